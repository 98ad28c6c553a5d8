//! Launches at random.

use super::Dice;
use anymesh_kernel::{
    DType, Device, Dims, Kernel, Layout, MapProgram, Scalar, Shape, View,
    backend::{
        Affine, GatherCall, IndexAxis, MapCall, MapInput, MatmulCall, ReduceCall, ReduceOp,
        ScanCall, ScanOp, SortCall,
    },
    map::{Builder, Val},
};
use smallvec::smallvec;

/// A launch, and what it is.
pub(crate) struct Made {
    pub(crate) kernel: Kernel,
    pub(crate) about: String,
}

pub(crate) struct Program<'p> {
    pub(crate) eager: &'p Device,
    pub(crate) faults: bool,
}

const DTYPES: [DType; 10] = [
    DType::F32,
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::F8E4M3,
    DType::I32,
    DType::U8,
    DType::Bool,
    DType::I64,
    DType::F64,
];

fn about(what: &str, views: &[&View], program: Option<&MapProgram>) -> String {
    let operands: Vec<String> = (views.iter())
        .map(|v| format!("{} {:?}", v.dtype, v.layout))
        .collect();
    let program = program.map(|p| format!("\n{p}")).unwrap_or_default();
    format!("{what} of {}{program}", operands.join("; "))
}

fn input(view: View) -> MapInput {
    MapInput { view, window: None }
}

impl Program<'_> {
    fn dtype(&self, dice: &mut Dice) -> DType {
        loop {
            let dtype = dice.of(&DTYPES);
            if self.eager.supports(dtype) {
                return dtype;
            }
        }
    }

    /// A fresh tensor, now and then with odd numbers in it.
    fn upload(&self, dice: &mut Dice, dtype: DType, shape: &Shape, positive: bool) -> View {
        let odd = dice.one_in(3);
        let mut bytes = vec![];
        for _ in 0..shape.numel() {
            let small = dice.below(41) as i64 - if positive { 0 } else { 20 };
            let value = small as f64 / 8.0;
            let strange = odd && !positive && dice.one_in(10);
            let float = |bits: [u64; 5], dice: &mut Dice| dice.of(&bits);
            match dtype {
                DType::Bool => bytes.push((small & 1) as u8),
                DType::U8 => bytes.push(small as u8),
                DType::I32 => bytes.extend((small as i32).to_le_bytes()),
                DType::I64 => bytes.extend(small.to_le_bytes()),
                DType::F64 => bytes.extend(value.to_le_bytes()),
                DType::F32 if strange => bytes.extend(
                    &float(
                        [0x7fc1_2345, 0xff80_0000, 0x8000_0000, 1, 0x7f7f_ffff],
                        dice,
                    )
                    .to_le_bytes()[..4],
                ),
                DType::F32 => bytes.extend((value as f32 * 1.1).to_le_bytes()),
                DType::BF16 if strange => bytes
                    .extend(&float([0x7fd3, 0xff80, 0x8000, 1, 0x7f91], dice).to_le_bytes()[..2]),
                DType::BF16 => {
                    bytes.extend(anymesh_kernel::bf16::from_f64(value * 1.1).to_le_bytes());
                }
                DType::F16 if strange => bytes
                    .extend(&float([0x7e53, 0xfc00, 0x8000, 1, 0x7d01], dice).to_le_bytes()[..2]),
                DType::F16 => {
                    bytes.extend(anymesh_kernel::f16::from_f64(value * 1.1).to_le_bytes())
                }
                DType::F8E4M3 => bytes.push(dice.below(256) as u8),
                _ => bytes.extend(vec![0; dtype.size()]),
            }
        }
        View {
            buffer: self.eager.upload(&bytes).expect("uploads"),
            dtype,
            layout: Layout::contiguous(shape.clone()),
        }
    }

    fn shape(dice: &mut Dice) -> Shape {
        match dice.below(8) {
            0 => Shape::from([1500]),
            1 => Shape::from([40, 70]),
            2 => Shape::scalar(),
            _ => (0..1 + dice.below(3))
                .map(|_| dice.of(&[1, 2, 3, 4, 6, 8]))
                .collect(),
        }
    }

    /// Any value, seen in any way.
    fn operand(&self, dice: &mut Dice, known: &[&View]) -> View {
        if known.is_empty() || dice.one_in(5) {
            let (dtype, shape) = (self.dtype(dice), Self::shape(dice));
            return self.upload(dice, dtype, &shape, false);
        }
        let view = dice.of(known).clone();
        View {
            layout: seen(dice, &view.layout),
            ..view
        }
    }

    /// A value that broadcasts to a shape.
    fn beside(&self, dice: &mut Dice, known: &[&View], shape: &Shape) -> View {
        let fits = |view: &&&View| {
            let own = &view.layout.shape;
            matches!(own.broadcast("t", shape), Ok(both) if both == *shape)
        };
        let all: Vec<View> = known.iter().filter(fits).map(|v| (*v).clone()).collect();
        let view = if all.is_empty() || dice.one_in(8) {
            let dtype = self.dtype(dice);
            let small = match shape.rank() {
                0 => shape.clone(),
                rank if dice.one_in(2) => shape.with(dice.below(rank), 1),
                _ => shape.clone(),
            };
            self.upload(dice, dtype, &small, false)
        } else {
            dice.of(&all)
        };
        View {
            layout: view.layout.expand(shape),
            ..view
        }
    }

    pub(crate) fn next(&self, dice: &mut Dice, known: &[&View]) -> Made {
        loop {
            let made = match dice.below(25) {
                0..=3 => Some(self.one(dice, known)),
                4..=7 => Some(self.two(dice, known)),
                8 => Some(self.three(dice, known)),
                9 => Some(self.cast(dice, known)),
                10 => self.pad(dice, known),
                11 => Some(self.positions(dice, known)),
                12..=14 => Some(self.reduce(dice, known)),
                15 => Some(self.product(dice, known)),
                16 => self.along(dice, known),
                17 => self.gather(dice, known),
                18 => Some(self.divide(dice, known)),
                19..=23 => self.along_rows(dice, known),
                _ => Some(self.copy(dice, known)),
            };
            if let Some(made) = made {
                return made;
            }
        }
    }

    fn map(
        op: &'static str,
        shape: Shape,
        views: Vec<View>,
        program: MapProgram,
        params: Vec<Scalar>,
    ) -> Made {
        let refs: Vec<&View> = views.iter().collect();
        let about = about(op, &refs, Some(&program));
        let call = MapCall {
            op,
            program,
            shape,
            inputs: views.into_iter().map(input).collect(),
            indices: smallvec![],
            params: params.into_iter().collect(),
            over: Default::default(),
        };
        Made {
            kernel: call.into(),
            about,
        }
    }

    /// A float for anything that is none.
    fn float<'b>(x: Val<'b>) -> Val<'b> {
        match x.kind().is_float() {
            true => x,
            false => x.cast(DType::F32),
        }
    }

    fn stored(&self, dice: &mut Dice, x: Val<'_>) -> DType {
        let wide = x.kind().dtype();
        match wide {
            DType::F32 => dice.of(&[DType::F32, DType::BF16, DType::F16, DType::F32]),
            DType::U32 => dice.of(&[DType::U32, DType::U8]),
            other => other,
        }
    }

    fn one(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let x = self.operand(dice, known);
        let (b, mut params) = (Builder::new(), vec![]);
        let v = Self::float(b.load(x.dtype));
        let wide = v.kind().dtype() == DType::F64;
        let functions = if wide && !self.eager.backend().capabilities().f64_math {
            3
        } else {
            7
        };
        let y = match dice.below(functions) {
            0 => -v,
            1 => v.abs(),
            2 => {
                params.push(Scalar::Float(dice.below(9) as f64 / 3.0));
                v * b.param(v.kind().dtype()) + 0.7
            }
            3 => v.exp(),
            4 => v.tanh(),
            5 => v.abs().sqrt(),
            _ => {
                let c = v * 0.797 * (v * v * 0.0447 + 1.0);
                v * 0.5 * (c.tanh() + 1.0)
            }
        };
        let dtype = self.stored(dice, y);
        let program = b.finish(&[(y, dtype)]).expect("valid");
        Self::map("one", x.layout.shape.clone(), vec![x], program, params)
    }

    fn two(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let x = self.operand(dice, known);
        let y = self.beside(dice, known, &x.layout.shape);
        let dtype = x.dtype.promote(y.dtype);
        let dtype = if self.eager.supports(dtype) {
            dtype
        } else {
            DType::F32
        };
        let b = Builder::new();
        let (v, w) = (b.load(x.dtype), b.load(y.dtype));
        let held = dtype.kind().dtype();
        let held = if held == DType::Bool {
            DType::I32
        } else {
            held
        };
        let (v, w) = (v.cast(held), w.cast(held));
        let outputs = match dice.below(8) {
            0 => vec![v + w],
            1 => vec![v - w],
            2 => vec![v * w],
            3 => vec![v.max(w)],
            4 => vec![v.lt(w)],
            // Of two products a compiler may make either one with the sum.
            5 => vec![v * v + w * w],
            6 => vec![v * w - w * w, v * v + w * v],
            _ => vec![v * w + v, v - w],
        };
        let outputs: Vec<(Val<'_>, DType)> = outputs
            .into_iter()
            .map(|v| (v, self.stored(dice, v)))
            .collect();
        let program = b.finish(&outputs).expect("valid");
        Self::map("two", x.layout.shape.clone(), vec![x, y], program, vec![])
    }

    fn three(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let x = self.operand(dice, known);
        let y = self.beside(dice, known, &x.layout.shape);
        let c = self.beside(dice, known, &x.layout.shape);
        let b = Builder::new();
        let (v, w, c2) = (b.load(x.dtype), b.load(y.dtype), b.load(c.dtype));
        // Elements that are chosen are moved, if they are of one dtype.
        let w = if x.dtype == y.dtype {
            w
        } else {
            w.cast(v.kind().dtype())
        };
        let chosen = c2.cast(DType::Bool).select(v, w);
        let program = b.finish(&[(chosen, x.dtype)]).expect("valid");
        Self::map(
            "where",
            x.layout.shape.clone(),
            vec![x, y, c],
            program,
            vec![],
        )
    }

    /// The elements of rows and a number for each of them, as softmax and norms have them.
    fn along_rows(&self, dice: &mut Dice, known: &[&View]) -> Option<Made> {
        let float = |v: &&View| v.dtype.is_float() && v.dtype != DType::F64;
        let rows = |x: &View, r: &View| {
            let dims = x.layout.shape.dims();
            dims.len() > 1 && dims[..dims.len() - 1] == *r.layout.shape.dims()
        };
        let floats: Vec<&View> = known.iter().copied().filter(float).collect();
        let pairs: Vec<(&View, &View)> = (floats.iter())
            .flat_map(|x| floats.iter().map(|r| (*x, *r)))
            .filter(|(x, r)| rows(x, r))
            .collect();
        if pairs.is_empty() {
            return None;
        }
        let (x, r) = dice.of(&pairs);
        let r = View {
            layout: (r.layout.unsqueeze(r.layout.shape.rank())).expand(&x.layout.shape),
            ..r.clone()
        };
        let b = Builder::new();
        let (v, w) = (b.load(x.dtype), b.load(r.dtype));
        let y = match dice.below(6) {
            0 => v - w,
            1 => (v - w).exp(),
            2 => v / w,
            3 => v * w + v,
            4 => v * w,
            _ => v.eq(w).select(v, w.lit(0.0)),
        };
        let dtype = self.stored(dice, y);
        let program = b.finish(&[(y, dtype)]).expect("valid");
        let (x, shape) = (x.clone(), x.layout.shape.clone());
        Some(Self::map("rows", shape, vec![x, r], program, vec![]))
    }

    fn cast(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let (x, to) = (self.operand(dice, known), self.dtype(dice));
        let program = MapProgram::cast(x.dtype, to);
        Self::map("cast", x.layout.shape.clone(), vec![x], program, vec![])
    }

    fn copy(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let x = self.operand(dice, known);
        let program = MapProgram::cast(x.dtype, x.dtype);
        Self::map("copy", x.layout.shape.clone(), vec![x], program, vec![])
    }

    fn pad(&self, dice: &mut Dice, known: &[&View]) -> Option<Made> {
        let x = self.operand(dice, known);
        if x.layout.shape.rank() == 0 || x.layout.shape.numel() > 500 {
            return None;
        }
        let axis = dice.below(x.layout.shape.rank());
        let (front, back) = (dice.below(3), dice.below(3));
        let shape = x
            .layout
            .shape
            .with(axis, x.layout.shape[axis] + front + back);
        let mut window: Dims<isize> = smallvec![0; shape.rank()];
        window[axis] = front as isize;
        let b = Builder::new();
        let v = b.load(x.dtype);
        let filled = v.inside().select(v, v.lit(1i64));
        let program = b.finish(&[(filled, x.dtype)]).expect("valid");
        let about = about("pad", &[&x], Some(&program));
        let kernel = MapCall {
            op: "pad",
            program,
            shape,
            inputs: smallvec![MapInput {
                view: x,
                window: Some(window)
            }],
            indices: smallvec![],
            params: smallvec![],
            over: Default::default(),
        }
        .into();
        Some(Made { kernel, about })
    }

    /// Positions, or random numbers made of them, with a value.
    fn positions(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let x = self.operand(dice, known);
        let b = Builder::new();
        let (v, at) = (Self::float(b.load(x.dtype)), b.index(DType::I32));
        let number = if dice.one_in(2) {
            let key = [(); 3].map(|()| b.param(DType::U32));
            b.philox(at, key, 1).cast(DType::F32) * (1.0 / 4_294_967_296.0)
        } else {
            at.cast(DType::F32) * 0.25
        };
        let sum = v + number.cast(v.kind().dtype());
        let dtype = self.stored(dice, sum);
        let program = b.finish(&[(sum, dtype)]).expect("valid");
        let params = (0..program.params.len()).map(|_| Scalar::Int(dice.below(1000) as i64));
        let about = about("positions", &[&x], Some(&program));
        let kernel = MapCall {
            op: "positions",
            shape: x.layout.shape.clone(),
            indices: smallvec![Affine {
                offset: 3,
                strides: x.layout.shape.strides().iter().map(|s| *s as i64).collect(),
            }],
            params: params.collect(),
            over: Default::default(),
            inputs: smallvec![input(x)],
            program,
        }
        .into();
        Made { kernel, about }
    }

    fn reduce(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let x = self.operand(dice, known);
        let rank = x.layout.shape.rank();
        let axes: Dims = (0..rank).filter(|_| dice.one_in(2)).collect();
        let axes = if axes.is_empty() {
            (0..rank).collect()
        } else if dice.one_in(2) {
            smallvec![rank - 1]
        } else {
            axes
        };
        let b = Builder::new();
        let v = b.load(x.dtype);
        let v = if v.kind().is_float() {
            v
        } else {
            v.cast(DType::I32)
        };
        let v = if dice.one_in(3) { v * v } else { v };
        let kind = v.kind();
        let program = b.finish(&[(v, kind.dtype())]).expect("valid");
        let modes = [
            ReduceOp::Sum,
            ReduceOp::Max,
            ReduceOp::ArgMax,
            ReduceOp::Min,
        ];
        let mode = match kind.dtype() {
            DType::F32 if dice.one_in(6) => ReduceOp::LogSumExp,
            _ => dice.of(&modes),
        };
        let dtype = match mode {
            ReduceOp::ArgMax => DType::I32,
            _ if kind.dtype() == DType::F32 => dice.of(&[DType::F32, DType::BF16]),
            _ => kind.dtype(),
        };
        let scale = (kind.is_float() && mode == ReduceOp::Sum && dice.one_in(2)).then_some(0.125);
        let about = about(&format!("{mode:?} over {axes:?}"), &[&x], Some(&program));
        let kernel = ReduceCall {
            map: MapCall {
                op: "reduce",
                program,
                shape: x.layout.shape.clone(),
                inputs: smallvec![input(x)],
                indices: smallvec![],
                params: smallvec![],
                over: Default::default(),
            },
            axes,
            mode,
            scale,
            dtype,
        }
        .into();
        Made { kernel, about }
    }

    fn product(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let matrix = |v: &&&View| v.layout.shape.rank() == 2 && v.dtype.is_float();
        let all: Vec<View> = known.iter().filter(matrix).map(|v| (*v).clone()).collect();
        let a = if all.is_empty() {
            self.upload(dice, DType::F32, &Shape::from([4, 6]), false)
        } else {
            dice.of(&all)
        };
        let b = View {
            layout: a.layout.permute(&[1, 0]),
            ..a.clone()
        };
        let about = about("product", &[&a, &b], None);
        let dtype = a.dtype;
        let kernel = MatmulCall {
            op: "matmul",
            a,
            b,
            scales: None,
            bias: None,
            addend: None,
            dtype,
        }
        .into();
        Made { kernel, about }
    }

    fn along(&self, dice: &mut Dice, known: &[&View]) -> Option<Made> {
        let x = self.operand(dice, known);
        if x.layout.shape.rank() == 0 || x.dtype == DType::Bool {
            return None;
        }
        let about = about("scan or sort", &[&x], None);
        let kernel = if dice.one_in(2) {
            let axis = dice.below(x.layout.shape.rank());
            let mode = ScanOp::Max;
            ScanCall {
                op: "scan",
                input: x,
                axis,
                mode,
                positions: true,
            }
            .into()
        } else {
            SortCall {
                op: "sort",
                input: x,
                descending: false,
            }
            .into()
        };
        Some(Made { kernel, about })
    }

    fn gather(&self, dice: &mut Dice, known: &[&View]) -> Option<Made> {
        let x = self.operand(dice, known);
        if x.layout.shape.rank() == 0 {
            return None;
        }
        let (len, count) = (x.layout.shape[0], 5);
        let wrong = self.faults && dice.one_in(6);
        let indices: Vec<u8> = (0..count)
            .map(|i| {
                if wrong && i == 3 {
                    len as i32
                } else {
                    dice.below(len) as i32
                }
            })
            .flat_map(i32::to_le_bytes)
            .collect();
        let shape = x.layout.shape.with(0, count);
        let column = std::iter::once(count)
            .chain(vec![1; shape.rank() - 1])
            .collect();
        let indices = View {
            buffer: self.eager.upload(&indices).expect("uploads"),
            dtype: DType::I32,
            layout: Layout::contiguous(column).expand(&shape),
        };
        let stride = x.layout.strides[0];
        let mut layout = Layout {
            shape,
            ..x.layout.clone()
        };
        layout.strides[0] = 0;
        let src = View { layout, ..x };
        let about = about("gather", &[&src], None);
        let kernel = GatherCall {
            op: "gather",
            src,
            axes: smallvec![IndexAxis {
                indices,
                len,
                stride
            }],
        }
        .into();
        Some(Made { kernel, about })
    }

    fn divide(&self, dice: &mut Dice, known: &[&View]) -> Made {
        let whole = |v: &&&View| v.dtype == DType::I32;
        let all: Vec<View> = known.iter().filter(whole).map(|v| (*v).clone()).collect();
        let x = match all.is_empty() {
            true => self.upload(dice, DType::I32, &Shape::from([3, 4]), false),
            false => dice.of(&all),
        };
        let b = Builder::new();
        let v = b.load(DType::I32);
        let program = if self.faults && dice.one_in(2) {
            b.finish(&[(v.floor_div(v), DType::I32)])
        } else {
            b.finish(&[(v.floor_div(v.abs() + 1i64), DType::I32)])
        };
        Self::map(
            "divide",
            x.layout.shape.clone(),
            vec![x],
            program.expect("valid"),
            vec![],
        )
    }
}

/// A view of a view.
fn seen(dice: &mut Dice, layout: &Layout) -> Layout {
    let mut out = layout.clone();
    for _ in 0..dice.below(3) {
        let rank = out.shape.rank();
        out = match dice.below(6) {
            0 if rank > 1 => {
                let mut order: Vec<usize> = (0..rank).collect();
                order.rotate_left(1);
                out.permute(&order)
            }
            1 if rank > 0 => {
                let axis = dice.below(rank);
                let size = out.shape[axis];
                let start = dice.below(size);
                out.slice(axis, start, 1, 1 + dice.below(size - start))
            }
            2 if rank > 0 => {
                let axis = dice.below(rank);
                let size = out.shape[axis];
                out.slice(axis, size - 1, -1, size)
            }
            3 if rank < 3 => {
                let wide = out.unsqueeze(0);
                let mut dims: Dims = wide.shape.dims().into();
                dims[0] = 1 + dice.below(4);
                wide.expand(&dims.into())
            }
            4 => {
                let all = out.shape.numel();
                let shape = match dice.below(3) {
                    0 => Shape::from([all]),
                    1 if all.is_multiple_of(2) => Shape::from([2, all / 2]),
                    _ if all.is_multiple_of(3) => Shape::from([all / 3, 3]),
                    _ => Shape::from([1, all]),
                };
                out.reshape(&shape).unwrap_or(out)
            }
            _ => out,
        };
    }
    // Programs do not grow without end.
    if out.shape.numel() > 20_000 {
        layout.clone()
    } else {
        out
    }
}
