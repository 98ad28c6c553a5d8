//! Random mappings against the same in loops, and random text.

use crate::array::{Array, Counting, region};
use anymesh_checkpoint::Source;
use anymesh_checkpoint::map::{Mapped, Mapping, Names, Options, Recipe};
use anymesh_core::DType;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// A small generator (SplitMix64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn pick<'x, T>(&mut self, from: &'x [T]) -> &'x T {
        &from[self.below(from.len())]
    }

    fn order(&mut self, n: usize) -> Vec<usize> {
        let mut out: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|i| out.swap(i, self.below(i + 1)));
        out
    }
}

const FLOATS: [DType; 6] = [
    DType::F8E4M3,
    DType::F8E5M2,
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::F64,
];

/// Random sources, statements over them of which each value is used once, and what they yield.
fn mapping(random: &mut Random) -> (BTreeMap<String, Array>, String, BTreeMap<String, Array>) {
    let mut sources = BTreeMap::new();
    for i in 0..2 + random.below(3) {
        let shape: Vec<usize> = (0..1 + random.below(3))
            .map(|_| *random.pick(&[1, 2, 3, 4, 6]))
            .collect();
        sources.insert(
            format!("s{i}"),
            Array::counting(*random.pick(&FLOATS), &shape, random.below(17)),
        );
    }
    let mut live = sources.clone();
    let mut text = String::new();
    for step in 0..1 + random.below(8) {
        let name = (*random.pick(&live.keys().cloned().collect::<Vec<_>>())).clone();
        let x = live.remove(&name).expect("it was picked");
        let rank = x.shape.len();
        match random.below(5) {
            0 => {
                let order = random.order(rank);
                text += &format!("{name} -> t{step}, permute=\"{order:?}\"\n");
                live.insert(format!("t{step}"), x.permute(&order));
            }
            1 => {
                let dtype = *random.pick(&FLOATS);
                text += &format!("{name} -> {name}, dtype={dtype} # a cast\n");
                live.insert(name, x.cast(dtype));
            }
            2 => {
                // All sizes' prime factors, dealt anew; a tensor without elements keeps its zero.
                let mut shape = vec![1; 1 + random.below(4)];
                for n in &x.shape {
                    let factors = [
                        vec![0],
                        vec![],
                        vec![2],
                        vec![3],
                        vec![2, 2],
                        vec![5],
                        vec![2, 3],
                    ]
                    .get(*n)
                    .cloned()
                    .unwrap_or(vec![*n]);
                    for f in factors {
                        let d = random.below(shape.len());
                        shape[d] *= f;
                    }
                }
                text += &format!("{name} -> t{step}, reshape=\"{shape:?}\"\n");
                live.insert(format!("t{step}"), x.reshape(&shape));
            }
            3 if rank > 0 => {
                let axis = random.below(rank);
                let first = random.below(x.shape[axis] + 1);
                let sizes = [first, x.shape[axis] - first];
                let parts = x.cut(axis, &sizes);
                text += &format!(
                    "{name} -> t{step}.a, t{step}.b, axis={axis}, sizes=\"{sizes:?}\", permute=\"[]\"\n"
                );
                let reversed: Vec<usize> = (0..rank).rev().collect();
                live.insert(format!("t{step}.a"), parts[0].permute(&reversed));
                live.insert(format!("t{step}.b"), parts[1].permute(&reversed));
            }
            _ => {
                // Joined with all that fit, in a random order, as one type.
                let axis = random.below(rank.max(1));
                let fits = |y: &Array| {
                    y.shape.len() == rank
                        && (0..rank).all(|d| d == axis || y.shape[d] == x.shape[d])
                };
                let others: Vec<String> = live
                    .iter()
                    .filter(|(_, y)| rank > 0 && fits(y))
                    .map(|(n, _)| n.clone())
                    .collect();
                let mut parts = vec![(name, x)];
                others
                    .into_iter()
                    .for_each(|n| parts.extend(live.remove(&n).map(|y| (n, y))));
                let order = random.order(parts.len());
                let names: Vec<&str> = order.iter().map(|i| parts[*i].0.as_str()).collect();
                if rank == 0 {
                    text += &format!("{} -> t{step}\n", names[0]);
                    live.insert(format!("t{step}"), parts[0].1.clone());
                    continue;
                }
                // Casts on their own, so that each says its own type before.
                names
                    .iter()
                    .for_each(|n| text += &format!("{n} -> {n}, dtype='float64'\n"));
                text += &format!("{} -> t{step}, axis={axis}\n", names.join(", "));
                live.insert(
                    format!("t{step}"),
                    Array::join(
                        &order
                            .iter()
                            .map(|i| parts[*i].1.cast(DType::F64))
                            .collect::<Vec<_>>(),
                        axis,
                    ),
                );
            }
        }
    }
    (sources, text, live)
}

fn random_region(random: &mut Random, shape: &[usize]) -> (Vec<usize>, Vec<usize>) {
    shape
        .iter()
        .map(|n| {
            let start = random.below(n + 1);
            (start, random.below(n - start + 1))
        })
        .unzip()
}

fn check(
    mapped: &Mapped<Counting>,
    expected: &BTreeMap<String, Array>,
    random: &mut Random,
    text: &str,
) {
    assert_eq!(
        mapped.tensors().keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "{text}"
    );
    for (name, array) in expected {
        assert_eq!(
            mapped.info(name).expect("it is there"),
            &array.info(),
            "{name} of\n{text}"
        );
        assert_eq!(
            mapped.read_all(name).expect("reads"),
            array.bytes(),
            "{name} of\n{text}"
        );
        for _ in 0..4 {
            let (start, shape) = random_region(random, &array.shape);
            let part = array.slice(&start, &shape);
            let before = mapped.source().elements.load(Ordering::Relaxed);
            let mut out = vec![0xaa; part.bytes().len()];
            mapped
                .read(name, &region(&start, &shape), &mut out)
                .expect("reads");
            assert_eq!(out, part.bytes(), "{name} {start:?} {shape:?} of\n{text}");
            let read = mapped.source().elements.load(Ordering::Relaxed) - before;
            assert_eq!(
                read,
                part.values.len(),
                "no element that is not needed: {name} {start:?} {shape:?} of\n{text}"
            );
        }
    }
}

#[test]
fn random_regions_of_random_mappings_are_what_loops_yield_and_the_inverse_leads_back() {
    let mut random = Random(5);
    for _ in 0..1500 {
        let (sources, text, expected) = mapping(&mut random);
        let source = Counting::new(&sources);
        let names = Names {
            left: sources.keys().map(|name| (name.clone(), 1)).collect(),
            ..Names::default()
        };
        let program = Mapping::parse(&text)
            .and_then(|m| m.expand(&names))
            .unwrap_or_else(|error| panic!("{error}"));
        let recipe = Recipe::new(&program, source.tensors(), None, false)
            .unwrap_or_else(|error| panic!("{error}\n{text}"));
        let infos = source.tensors().clone();
        let forward = Mapped::with_recipe(source, recipe);
        check(&forward, &expected, &mut random, &text);

        let back = program
            .complete(&infos)
            .and_then(|p| p.reverse())
            .unwrap_or_else(|error| panic!("{error}\n{text}"));
        // The inverse is text like any other.
        let back_text = back.to_string();
        let back = Mapped::new(
            Counting::new(&expected),
            &Mapping::parse(&back_text).expect("reads"),
            &Options::default(),
        )
        .unwrap_or_else(|error| panic!("{error}\n{back_text}"));
        check(&back, &sources, &mut random, &back_text);
    }
}

const LEFT: &str = "a a a b b c d a^T b^T l.0.w l.1.w l.$LAYER_ID.w l.$LAYER_ID.w^T l.$EXPERT_ID.w l.$LAYER_ID_OFFSET.w l.*.w t.$LAYER_ID $X _ c[0:3] \
    c[0:99999999999] 'q'";
const RIGHT: &str = "c d e f g h c^T d^T a t.$LAYER_ID u.$LAYER_ID l.$LAYER_ID_OFFSET.w m.$EXPERT_ID m.$LAYER_ID.* $X _ c[0:3] c[3:0] 'q'";
const ATTRS: &str = "axis=0 axis=1 axis=-1 sizes=[1,3] sizes=\"[2]\" permute=\"[]\" permute=[1,0] reshape=[-1] reshape=[4,4,1] reshape=[9223372036854775807,4] \
    dtype=bf16 dtype='float64' dtype=int32 src_dtype=f32 dst_dtype=f16 src_shape=[4,4] dst_shape=[16] fused_qkv fused_qkv_old fused_ffn num_heads=4 num_heads=-1 \
    num_key_value_groups=2 num_key_value_groups=0 src_degree=2 dst_degree=3";
const WILD: &str = "-> -> , = [ ] : ^T ^ \" ' # - é 18446744073709551616 7 $ * _";

#[test]
fn random_text_is_refused_or_mapped_and_never_panics() {
    let [left, right, attrs, wild] =
        [LEFT, RIGHT, ATTRS, WILD].map(|words| words.split_whitespace().collect::<Vec<_>>());
    let tensors = |names: [&str; 6]| -> BTreeMap<_, _> {
        names
            .map(|name| (name.to_string(), Array::counting(DType::F32, &[4, 4], 0)))
            .into()
    };
    let (here, there) = (
        tensors(["a", "b", "l.0.w", "l.1.w", "l.10.w", "a.w_0"]),
        tensors(["c", "d", "e", "t.0", "u.1", "c.w_0"]),
    );
    let mut random = Random(17);
    let (mut parsed, mut mapped, mut reversed) = (0, 0, 0);
    for _ in 0..20_000 {
        let mut text = String::new();
        for _ in 0..1 + random.below(3) {
            let mut list = |words: &[&str], count: usize| {
                (0..count)
                    .map(|_| *random.pick(words))
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            let sides = [
                list(&left, 1),
                list(&left, 2),
                list(&left, 3),
                list(&right, 1),
                list(&right, 2),
            ];
            let (n, m) = (
                [0, 0, 0, 1, 2][random.below(5)],
                if random.below(4) == 0 { 4 } else { 3 },
            );
            text += &format!("{} -> {}", sides[n], sides[m]);
            if (n, m) != (0, 3) && random.below(4) > 0 {
                text += ", axis=0";
            }
            text += &(0..random.below(6) / 3)
                .map(|_| format!(", {}", random.pick(&attrs)))
                .collect::<String>();
            // Sometimes anything, anywhere.
            if random.below(8) == 0 {
                let mut at = random.below(text.len() + 1);
                while !text.is_char_boundary(at) {
                    at -= 1;
                }
                text.insert_str(at, wild[random.below(wild.len())]);
            }
            text.push('\n');
        }
        let Ok(mapping) = Mapping::parse(&text) else {
            continue;
        };
        parsed += 1;
        for reverse in [false, true] {
            let options = Options {
                reverse,
                only_mapped: random.below(2) == 0,
                ..Options::default()
            };
            let Ok(made) = Mapped::new(
                Counting::new(if reverse { &there } else { &here }),
                &mapping,
                &options,
            ) else {
                continue;
            };
            if reverse {
                reversed += 1
            } else {
                mapped += 1
            };
            for (name, info) in made.tensors() {
                assert_eq!(
                    made.read_all(name)
                        .expect("what is mapped can be read")
                        .len(),
                    info.bytes(),
                    "{text}"
                );
            }
        }
    }
    assert!(
        parsed > 10_000 && mapped > 300 && reversed > 100,
        "the texts are too wild to test anything: {parsed} {mapped} {reversed}"
    );
}
