//! What the solver chooses against everything that could be chosen, and against what then runs.

use anymesh_core::{
    DType, Mesh, Reduction, Result, Shape, Sharding, Tensor, TensorType, meta,
    reshard::{Objective, plan},
    spmd::{
        Choice, Decision, Held, Ledger,
        rule::{FactorKind, Rule},
        trace, with_held,
    },
};
use std::collections::{HashMap, HashSet};

/// Numbers that look random and are the same every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (self.0 >> 33) as usize % n
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    fn mesh(&mut self) -> Mesh {
        let axes = 1 + self.below(3);
        let sizes: &[usize] = if axes == 3 { &[2, 2, 3] } else { &[2, 3, 4] };
        let axes: Vec<String> = (0..axes)
            .map(|a| format!("m{a}={}", self.of(sizes)))
            .collect();
        Mesh::new(&axes.join(","), &meta()).expect("a mesh")
    }

    /// Zeros of these dimensions, lying somehow.
    fn tensor(&mut self, dims: &[usize], mesh: &Mesh, reduction: Reduction) -> Tensor {
        let mut order: Vec<usize> = (0..mesh.axes().len()).collect();
        for i in 1..order.len() {
            order.swap(i, self.below(i + 1));
        }
        let mut sharding = Sharding::replicated();
        for axis in order {
            sharding = match self.below(6) {
                0 | 1 => sharding,
                2 => sharding.partial_over(axis, reduction),
                _ => sharding.cut(self.below(dims.len()), axis),
            };
        }
        Tensor::zeros(dims, DType::F32, (mesh, &sharding)).expect("a tensor")
    }
}

type Op = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// A random op with random operands.
fn case(dice: &mut Dice) -> (&'static str, Op, Vec<Tensor>) {
    const SIZES: &[usize] = &[1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24];
    let mesh = dice.mesh();
    let dims: Vec<usize> = (0..1 + dice.below(3)).map(|_| dice.of(SIZES)).collect();
    let reduction = dice.of(&[Reduction::Sum, Reduction::Sum, Reduction::Max]);
    match dice.below(8) {
        0 => (
            "exp",
            Box::new(|x| x[0].exp()),
            vec![dice.tensor(&dims, &mesh, reduction)],
        ),
        1 => (
            "neg",
            Box::new(|x| x[0].neg()),
            vec![dice.tensor(&dims, &mesh, reduction)],
        ),
        n @ (2 | 3) => {
            // The second operand broadcasts, or does not.
            let second = &dims[if dice.below(2) == 0 {
                dims.len() - 1
            } else {
                0
            }..];
            let operands = vec![
                dice.tensor(&dims, &mesh, reduction),
                dice.tensor(second, &mesh, reduction),
            ];
            if n == 2 {
                ("add", Box::new(|x| x[0].add(&x[1])), operands)
            } else {
                ("mul", Box::new(|x| x[0].mul(&x[1])), operands)
            }
        }
        4 | 5 => {
            let (m, k, n) = (dice.of(SIZES), dice.of(SIZES), dice.of(SIZES));
            let operands = vec![
                dice.tensor(&[m, k], &mesh, Reduction::Sum),
                dice.tensor(&[k, n], &mesh, Reduction::Sum),
            ];
            ("matmul", Box::new(|x| x[0].matmul(&x[1])), operands)
        }
        n => {
            let axis = dice.below(dims.len()) as i64;
            let x = vec![dice.tensor(&dims, &mesh, reduction)];
            if n == 6 {
                ("sum", Box::new(move |x| x[0].sum(&[axis], false)), x)
            } else {
                ("amax", Box::new(move |x| x[0].amax(&[axis], true)), x)
            }
        }
    }
}

/// Bytes from one sharding to others, each asked for once.
struct Prices<'a> {
    mesh: &'a Mesh,
    shape: Shape,
    known: HashMap<(Sharding, Sharding), u64>,
}

impl<'a> Prices<'a> {
    fn new(mesh: &'a Mesh, shape: &Shape) -> Self {
        Self {
            mesh,
            shape: shape.clone(),
            known: HashMap::new(),
        }
    }

    fn of(&mut self, from: &Sharding, to: &Sharding) -> u64 {
        let Self { mesh, shape, .. } = self;
        let planned = || plan(mesh, shape, DType::F32, from, to, Objective::Bytes);
        *self
            .known
            .entry((from.clone(), to.clone()))
            .or_insert_with(|| planned().expect("a plan").recv_bytes)
    }
}

/// Bytes that combining the partial values of a result takes, by its partial axes alone: axes that
/// it does not use are kept busy with a dimension of their own.
fn owed(mesh: &Mesh, shape: &Shape, sharding: &Sharding) -> u64 {
    if !sharding.is_partial() {
        return 0;
    }
    let idle = (0..mesh.axes().len()).filter(|a| {
        sharding.placements(mesh.axes().len())[*a] == anymesh_core::Placement::Replicate
    });
    let size: usize = idle.clone().map(|a| mesh.size(a)).product();
    let mut dims = vec![size];
    dims.extend(shape.dims());
    let busy = idle.fold(Sharding::replicated(), |s, a| s.cut(0, a));
    let cut = sharding.cuts().fold(busy, |s, (d, a)| s.cut(d + 1, a));
    let from = sharding
        .partial()
        .fold(cut.clone(), |s, (a, r)| s.partial_over(a, r));
    let mut ends = vec![];
    let axes: Vec<usize> = sharding.partial().map(|(a, _)| a).collect();
    cut_further(cut, &axes, dims.len(), &mut ends);
    let mut prices = Prices::new(mesh, &dims.iter().copied().collect());
    ends.iter()
        .map(|to| prices.of(&from, to))
        .min()
        .unwrap_or(0)
}

/// All ways to cut the dimensions of a result further by some or none of these axes.
fn cut_further(at: Sharding, axes: &[usize], rank: usize, ends: &mut Vec<Sharding>) {
    for axis in axes {
        let rest: Vec<usize> = axes.iter().copied().filter(|a| a != axis).collect();
        for d in 1..rank {
            cut_further(at.clone().cut(d, *axis), &rest, rank, ends);
        }
    }
    ends.push(at);
}

/// What each operand and each result is like if the axes, in an order, do this. `None` where values
/// would be partial in two ways.
fn assigned(
    rule: &Rule,
    choices: &[Choice],
    order: &[usize],
) -> Option<(Vec<Sharding>, Vec<Sharding>)> {
    let has = |dims: &[anymesh_core::spmd::rule::Factors], f: usize| {
        dims.iter().position(|d| d.contains(&(f as u8)))
    };
    let kind = |f: usize| rule.factors[f].kind;
    let operand = |i: usize| {
        order
            .iter()
            .fold(Sharding::replicated(), |s, &axis| match choices[axis] {
                Choice::Through(mask, r) if mask >> i & 1 == 1 => s.partial_over(axis, r),
                Choice::Cut(f) => match has(&rule.inputs[i], f) {
                    Some(d) => s.cut(d, axis),
                    None if kind(f) == FactorKind::Reduce(Reduction::Sum)
                        && rule.addends >> i & 1 == 1 =>
                    {
                        s.partial_over(axis, Reduction::Sum)
                    }
                    None => s,
                },
                _ => s,
            })
    };
    let result = |o: usize| {
        order
            .iter()
            .fold(Sharding::replicated(), |s, &axis| match choices[axis] {
                Choice::Through(_, r) => s.partial_over(axis, r),
                Choice::Cut(f) => match (has(&rule.outputs[o], f), kind(f)) {
                    (Some(d), _) => s.cut(d, axis),
                    (None, FactorKind::Reduce(r)) => s.partial_over(axis, r),
                    _ => s,
                },
                Choice::Whole => s,
            })
    };
    let inputs: Vec<Sharding> = (0..rule.inputs.len()).map(operand).collect();
    let outputs: Vec<Sharding> = (0..rule.outputs.len()).map(result).collect();
    let one_way = |s: &Sharding| {
        let kinds: HashSet<Reduction> = s.partial().map(|(_, r)| r).collect();
        kinds.len() <= 1
    };
    (inputs.iter().chain(&outputs).all(one_way)).then_some((inputs, outputs))
}

/// All orders of `0..n`.
fn permutations(n: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for axis in 0..n {
        all = all
            .iter()
            .flat_map(|p: &Vec<usize>| {
                (0..=p.len()).map(move |at| {
                    let mut p = p.clone();
                    p.insert(at, axis);
                    p
                })
            })
            .collect();
    }
    all
}

/// The least that any assignment takes, with what its results owe, or nothing where one moves
/// nothing.
fn least(decision: &Decision, shapes: &[Shape]) -> u64 {
    let (rule, operands) = (&decision.rule, &decision.inputs);
    let mesh = operands[0].mesh();
    let mut choices = vec![Choice::Whole];
    let cut = |f: &usize| rule.factors[*f].kind != FactorKind::Whole;
    choices.extend((0..rule.factors.len()).filter(cut).map(Choice::Cut));
    for through in &rule.through {
        choices.extend(
            through
                .reductions
                .iter()
                .map(|r| Choice::Through(through.operands, *r)),
        );
    }
    let axes = mesh.axes().len();
    let mut prices: Vec<Prices<'_>> = operands
        .iter()
        .map(|x| Prices::new(mesh, x.shape()))
        .collect();
    let mut owing: HashMap<Sharding, u64> = HashMap::new();
    let (mut seen, mut best) = (HashSet::new(), u64::MAX);
    for order in permutations(axes) {
        for number in 0..choices.len().pow(axes as u32) {
            let digit = |axis| choices[number / choices.len().pow(axis as u32) % choices.len()];
            let choices: Vec<Choice> = (0..axes).map(digit).collect();
            let Some((inputs, outputs)) = assigned(rule, &choices, &order) else {
                continue;
            };
            if !seen.insert((inputs.clone(), outputs.clone())) {
                continue;
            }
            let mut bytes = 0;
            for ((x, to), prices) in operands.iter().zip(&inputs).zip(&mut prices) {
                bytes += prices.of(x.sharding(), to);
            }
            if bytes == 0 {
                return 0;
            }
            if bytes < best {
                for (sharding, shape) in outputs.iter().zip(shapes) {
                    let known = owing.entry(sharding.clone());
                    bytes += *known.or_insert_with(|| owed(mesh, shape, sharding));
                }
            }
            best = best.min(bytes);
        }
    }
    best
}

const CASES: usize = 400;

#[test]
fn no_choice_takes_less_than_the_one_that_is_made_and_it_takes_what_it_promises() {
    let mut dice = Dice(12);
    let (mut moved, mut free, mut more) = (0, 0, 0);
    let (mut all_taken, mut all_least) = (0, 0);
    // Each case by itself: what one has gathered is not at hand in the next.
    let alone = Held { calls: 0, bytes: 0 };
    for number in 0..CASES {
        let (op, run, operands) = case(&mut dice);
        let ((out, ledger), decisions) =
            with_held(alone, || trace(|| Ledger::record(|| run(&operands))));
        let out = out.unwrap_or_else(|e| panic!("case {number}, {op}: {e}"));
        let [decision] = &decisions[..] else {
            panic!("case {number}: {op} made {} decisions", decisions.len());
        };
        let types: Vec<String> = operands.iter().map(Tensor::type_string).collect();
        let what = || {
            let mesh = operands[0].mesh();
            format!(
                "case {number}: {op} of {} on {mesh}, chosen {:?}",
                types.join(" and "),
                decision.solution
            )
        };
        let promised = decision.solve().expect("a solution");
        assert_eq!(promised.bytes, ledger.bytes(), "{}", what());
        assert_eq!(promised.inputs, decision.solution.inputs, "{}", what());
        let least = least(decision, &[out.shape().clone()]);
        let bytes = ledger.bytes();
        let taken = if bytes == 0 {
            0
        } else {
            bytes + owed(out.mesh(), out.shape(), out.sharding())
        };
        assert!(
            least > 0 || taken == 0,
            "{taken} where nothing will do, {}",
            what()
        );
        assert!(
            taken * 4 <= least * 5,
            "{taken} where {least} will do, {}",
            what()
        );
        more += usize::from(taken * 100 > least * 101);
        (all_taken, all_least) = (all_taken + taken, all_least + least);
        if bytes == 0 { free += 1 } else { moved += 1 }
    }
    // A few bytes of a small operand are no reason to cut a large result by an axis that nobody uses.
    println!(
        "{all_taken} bytes where {all_least} will do; more than that in {more} of {moved} cases that move something"
    );
    assert!(all_taken * 100 <= all_least * 101 && more * 25 <= moved);
    assert!(moved > CASES / 3 && free > CASES / 10, "{moved} and {free}");
}

/// The bytes that an op takes on a mesh, with operands of these types.
fn bytes(mesh: &str, types: &[&str], op: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>) -> u64 {
    let mesh = Mesh::new(mesh, &meta()).expect("a mesh");
    let operand = |text: &&str| {
        let ty = TensorType::parse(text, &mesh).expect("a type");
        Tensor::zeros(&ty.shape, ty.dtype, (&mesh, &ty.sharding)).expect("a tensor")
    };
    let operands: Vec<Tensor> = types.iter().map(operand).collect();
    let (out, ledger) = Ledger::record(|| op(&operands));
    out.expect("a result");
    ledger.bytes()
}

#[test]
fn axes_that_no_operand_uses_divide_what_moves() {
    let matmul = |x: &[Tensor]| Ok(vec![x[0].matmul(&x[1])?]);
    assert_eq!(
        bytes("a=2,b=2", &["f32[8,12@a]", "f32[12,16@a]"], matmul),
        96
    );
    let exp = |x: &[Tensor]| Ok(vec![x[0].exp()?]);
    assert_eq!(bytes("a=4,b=2", &["f32[8,4]{sum:b}"], exp), 16);
    // Nothing moves, so nothing begins to be cut.
    let mesh = Mesh::new("a=2,b=2", &meta()).expect("a mesh");
    let x = Tensor::zeros([8, 4], DType::F32, (&mesh, "[@a, _]")).expect("a tensor");
    assert_eq!(x.exp().expect("a result").type_string(), "f32[8@a, 4]");
}

#[test]
fn a_dimension_with_fewer_elements_than_ranks_may_be_cut() {
    let exp = |x: &[Tensor]| Ok(vec![x[0].exp()?]);
    assert_eq!(bytes("a=4", &["f32[3,2]{sum:a}"], exp), 24);
    let sqrt = |x: &[Tensor]| Ok(vec![x[0].sqrt()?]);
    assert_eq!(bytes("a=2,b=2", &["f32[5]{sum:a,sum:b}"], sqrt), 20);
}

#[test]
fn what_several_steps_read_is_combined_once_into_the_best_cut() {
    let x = "f32[8,4]{sum:a}";
    let both = |x: &[Tensor]| {
        let (values, positions) = x[0].max_with_indices(1, false)?;
        Ok(vec![values, positions])
    };
    assert_eq!(bytes("a=4", &[x], both), 96);
    assert_eq!(
        bytes("a=4", &[x], |x| Ok(vec![x[0].amax(&[1], false)?])),
        96
    );
    assert_eq!(
        bytes("a=4", &[x], |x| Ok(vec![x[0].var(&[1], false, 1)?])),
        96
    );
    assert_eq!(
        bytes("a=4", &[x], |x| Ok(vec![x[0].std(&[1], false, 1)?])),
        96
    );
}
