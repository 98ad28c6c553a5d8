//! Softmax and the norms, fused: a row is read once, held in registers, and written once.
//!
//! Some threads of a cube share a row, each with a few chunks of four elements. Rows that are too
//! long for that, or whose length is not a multiple of four, are left to the decomposition.

use crate::{
    CubeBackend, Memory,
    intern::Interned,
    map::{CUBE, Outputs, store},
    math,
    program::{Inputs, MapPlan, eval},
    reg::Reg,
    words::F4,
};
use anymesh_kernel::{
    Buffer, DType, Layout, Result, Shape, View,
    backend::{MapCall, MapInput, RowCall, RowOp},
    map::{Builder, Unary},
};
use cubecl::prelude::*;
use smallvec::{SmallVec, smallvec};

/// Chunks that one thread may hold.
const MAX_CHUNKS: usize = 16;

/// What the kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Fused {
    kind: FusedKind,
    weight: bool,
    bias: bool,
    /// Threads that share a row.
    width: u32,
    /// Chunks each of them holds.
    chunks: usize,
    dtype: DType,
    /// Whether 32 neighbouring threads can exchange values without shared memory.
    planes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum FusedKind {
    Softmax,
    LogSoftmax,
    LayerNorm,
    RmsNorm,
}

/// The sum (or maximum) of a value over the `width` threads of a row, known to all of them. Called
/// by every thread of the cube.
#[cube]
fn across(
    value: f32,
    #[comptime] width: u32,
    #[comptime] largest: bool,
    #[comptime] planes: bool,
) -> f32 {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let mut value = value;
    let me = UNIT_POS as usize;
    let lane = UNIT_POS % width;
    let first = (UNIT_POS - lane) as usize;
    if comptime!(planes && width >= 32) {
        let part = if comptime!(largest) {
            plane_max(value)
        } else {
            plane_sum(value)
        };
        shared[me / 32usize] = part;
        sync_cube();
        value = shared[first / 32usize];
        #[unroll]
        for k in 1..comptime!(width as usize / 32) {
            value = merge(value, shared[first / 32usize + k], largest);
        }
    } else {
        let mut half = comptime!(width / 2).runtime();
        while half > 0u32 {
            shared[me] = value;
            sync_cube();
            if lane < half {
                value = merge(value, shared[me + half as usize], largest);
            }
            sync_cube();
            half /= 2u32;
        }
        shared[me] = value;
        sync_cube();
        value = shared[first];
    }
    sync_cube();
    value
}

#[cube]
fn merge(a: f32, b: f32, #[comptime] largest: bool) -> f32 {
    if comptime!(largest) {
        max_nan(a, b)
    } else {
        a + b
    }
}

#[cube]
fn lane_sum(x: F4) -> f32 {
    (x.extract(0usize) + x.extract(1usize)) + (x.extract(2usize) + x.extract(3usize))
}

#[cube]
fn lane_max(x: F4) -> f32 {
    max_nan(
        max_nan(x.extract(0usize), x.extract(1usize)),
        max_nan(x.extract(2usize), x.extract(3usize)),
    )
}

/// Operand `which` (0 the input, then weight, then bias) at four positions.
#[cube]
#[allow(unused_variables)]
fn operand(
    inputs: &Inputs,
    start: usize,
    #[comptime] plan: Interned<MapPlan>,
    #[comptime] which: usize,
) -> F4 {
    intrinsic!(|scope| {
        let regs = eval(scope, inputs, &plan, start, &mut |_| {});
        match regs[which] {
            Reg::F(x) => x,
            _ => panic!("rows are floats"),
        }
    })
}

#[cube]
#[allow(unused_variables)]
fn put(out: &mut Outputs, chunk: usize, value: F4, #[comptime] dtype: DType) {
    intrinsic!(|scope| {
        let raw = Reg::F(value).to_raw(scope, dtype);
        store(scope, out, 0, chunk, raw, dtype)
    })
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn row_kernel(
    inputs: &Inputs,
    out: &mut Outputs,
    rows: usize,
    length: usize,
    lowest: f32,
    eps: f32,
    #[comptime] plan: Interned<MapPlan>,
    #[comptime] fused: Fused,
) {
    let width = comptime!(fused.width as usize);
    let line =
        CUBE_POS * comptime!(CUBE as usize / fused.width as usize) + UNIT_POS as usize / width;
    // Surplus threads repeat the last row, so that everybody meets at the barriers; they write
    // nothing.
    let row = min(line, rows - 1usize);
    let lane = UNIT_POS as usize % width;
    let quarter = length / 4usize;
    let softmax = comptime!(matches!(
        fused.kind,
        FusedKind::Softmax | FusedKind::LogSoftmax
    ));
    let filler = if comptime!(softmax) {
        F4::new(lowest)
    } else {
        F4::new(0.0f32)
    };

    let mut held = Array::<F4>::new(fused.chunks);
    #[unroll]
    for k in 0..fused.chunks {
        let chunk = lane + k * width;
        let inside = chunk < quarter;
        let at = row * length + select(inside, chunk, 0usize) * 4usize;
        let x = operand(inputs, at, plan.clone(), 0usize);
        held[k] = select(inside, x, filler);
    }

    if comptime!(softmax) {
        let mut top = filler;
        #[unroll]
        for k in 0..fused.chunks {
            top = max_nan(top, held[k]);
        }
        let top = F4::new(across(lane_max(top), fused.width, true, fused.planes));
        let mut total = F4::new(0.0f32);
        #[unroll]
        for k in 0..fused.chunks {
            let shifted = held[k] - top;
            let e = math::unary(shifted, Unary::Exp);
            total += e;
            held[k] = if comptime!(fused.kind == FusedKind::Softmax) {
                e
            } else {
                shifted
            };
        }
        let total = F4::new(across(lane_sum(total), fused.width, false, fused.planes));
        let shift = math::unary(total, Unary::Log);
        let factor = F4::new(1.0f32) / total;
        #[unroll]
        for k in 0..fused.chunks {
            let chunk = lane + k * width;
            if line < rows && chunk < quarter {
                let y = if comptime!(fused.kind == FusedKind::Softmax) {
                    held[k] * factor
                } else {
                    held[k] - shift
                };
                put(out, row * quarter + chunk, y, fused.dtype);
            }
        }
    } else {
        let count = length as f32;
        let mut mean = F4::new(0.0f32);
        if comptime!(fused.kind == FusedKind::LayerNorm) {
            let mut total = F4::new(0.0f32);
            #[unroll]
            for k in 0..fused.chunks {
                total += held[k];
            }
            mean = F4::new(across(lane_sum(total), fused.width, false, fused.planes) / count);
        }
        let mut squares = F4::new(0.0f32);
        #[unroll]
        for k in 0..fused.chunks {
            let chunk = lane + k * width;
            let centred = held[k] - mean;
            squares += select(chunk < quarter, centred * centred, F4::new(0.0f32));
            held[k] = centred;
        }
        let variance = across(lane_sum(squares), fused.width, false, fused.planes) / count;
        let factor = F4::new(1.0f32 / (variance + eps).sqrt());
        #[unroll]
        for k in 0..fused.chunks {
            let chunk = lane + k * width;
            if line < rows && chunk < quarter {
                let at = row * length + chunk * 4usize;
                let mut y = held[k] * factor;
                if comptime!(fused.weight) {
                    y = y * operand(inputs, at, plan.clone(), 1usize);
                }
                if comptime!(fused.bias) {
                    y += operand(
                        inputs,
                        at,
                        plan.clone(),
                        comptime!(1 + fused.weight as usize),
                    );
                }
                put(out, row * quarter + chunk, y, fused.dtype);
            }
        }
    }
}

/// Threads that share a row, and the chunks that each of them holds.
fn cut(length: usize) -> (usize, usize) {
    let width = (length.div_ceil(4).next_power_of_two()).clamp(1, CUBE as usize);
    (width, length.div_ceil(4 * width))
}

/// Whether a row fits into the registers of a cube, and all is computed in f32.
pub(crate) fn fits(call: &RowCall) -> bool {
    let length = call.input.layout.shape[1];
    let narrow = |view: &View| view.dtype != DType::F64;
    let parameters = match &call.mode {
        RowOp::Softmax | RowOp::LogSoftmax => true,
        RowOp::Norm { weight, bias, .. } => weight.iter().chain(bias).all(narrow),
    };
    length % 4 == 0 && cut(length).1 <= MAX_CHUNKS && narrow(&call.input) && parameters
}

impl CubeBackend {
    pub(crate) fn run_row(&self, call: &RowCall) -> Result<Buffer> {
        let (rows, length, dtype) = (
            call.input.layout.shape[0],
            call.input.layout.shape[1],
            call.input.dtype,
        );
        let (width, chunks) = cut(length);
        let (kind, eps, params, split) = match &call.mode {
            RowOp::Softmax => (FusedKind::Softmax, 0.0, [None, None], [rows, 1, length, 1]),
            RowOp::LogSoftmax => (
                FusedKind::LogSoftmax,
                0.0,
                [None, None],
                [rows, 1, length, 1],
            ),
            RowOp::Norm {
                rms,
                eps,
                weight,
                bias,
                groups,
                channels,
                inner,
            } => {
                let kind = if *rms {
                    FusedKind::RmsNorm
                } else {
                    FusedKind::LayerNorm
                };
                (
                    kind,
                    *eps,
                    [weight.as_ref(), bias.as_ref()],
                    [rows / groups, *groups, *channels, *inner],
                )
            }
        };
        // The input and its parameters as operands of one map program over [rows / groups, groups,
        // channels, inner].
        let shape = Shape::from(split);
        let builder = Builder::new();
        let mut values = vec![(builder.load(dtype), DType::F32)];
        let mut inputs: SmallVec<[MapInput; 2]> = smallvec![MapInput {
            view: View {
                layout: Layout {
                    shape: shape.clone(),
                    strides: shape.strides(),
                    offset: call.input.layout.offset,
                },
                ..call.input.clone()
            },
            window: None,
        }];
        for view in params.into_iter().flatten() {
            values.push((builder.load(view.dtype), DType::F32));
            let strides = smallvec![0, split[2] as isize, 1, 0];
            inputs.push(MapInput {
                view: View {
                    layout: Layout {
                        shape: shape.clone(),
                        strides,
                        offset: view.layout.offset,
                    },
                    ..view.clone()
                },
                window: None,
            });
        }
        let map = MapCall {
            op: call.op,
            program: builder.finish(&values)?,
            shape,
            inputs,
            indices: smallvec![],
            params: smallvec![],
        };
        let bound = self.bind_program(&map, None, Some(length))?;
        let hardware = &self.client.properties().hardware;
        let fused = Fused {
            kind,
            weight: params[0].is_some(),
            bias: params[1].is_some(),
            width: width as u32,
            chunks,
            dtype,
            planes: self.planes && hardware.plane_size_min == 32 && hardware.plane_size_max == 32,
        };
        let out: Memory = self.alloc(dtype, rows * length)?;
        // SAFETY: surplus rows and chunks write nothing.
        unsafe {
            row_kernel::launch_unchecked(
                &self.client,
                crate::cubes(rows * width, CUBE),
                CubeDim::new_1d(CUBE),
                bound.address,
                bound.launch(),
                Outputs::bound(&[(out.clone(), dtype)]),
                rows,
                length,
                f32::NEG_INFINITY,
                eps as f32,
                self.programs.intern(bound.plan),
                fused,
            );
        }
        Ok(out.buffer())
    }
}
