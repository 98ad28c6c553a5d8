//! Kernels that are launched together.

use crate::Suite;
use anymesh::{
    DType, Device, Layout, MapProgram, View,
    backend::{Kernel, MapCall, MapInput},
    map::Builder,
};

pub(crate) const SUITE: Suite = &[(
    "maps_that_are_launched_together_give_the_bits_of_maps_launched_by_themselves",
    maps_that_are_launched_together_give_the_bits_of_maps_launched_by_themselves,
)];

/// Sizes from one element to some cubes, with odd ends.
const SIZES: [usize; 9] = [1, 768, 3, 70_001, 4096, 8191, 8192, 8193, 20_000];

fn view(device: &Device, dtype: DType, elements: usize, offset: usize, salt: usize) -> View {
    // Any bits that are small numbers, whatever the dtype.
    let bytes: Vec<u8> = (0..(elements + offset) * dtype.size())
        .map(|i| match i % dtype.size() + 1 == dtype.size() {
            true => 0x3f,
            false => ((i + salt) * 37 % 251) as u8,
        })
        .collect();
    let mut layout = Layout::contiguous([elements].into());
    layout.offset = offset;
    View {
        buffer: device.upload(&bytes).expect("uploads"),
        dtype,
        layout,
    }
}

/// Steps of two floats in three dtypes, some of which only move.
fn program(inputs: [DType; 2], outputs: [DType; 3]) -> MapProgram {
    let b = Builder::new();
    let (x, y) = (b.load(inputs[0]), b.load(inputs[1]));
    let (x, y) = (x.cast(DType::F32), y.cast(DType::F32));
    let step = b.param(DType::F32);
    let sum = x * step + y / (x * x + 1.0).sqrt();
    b.finish(&[(sum, outputs[0]), (sum.exp(), outputs[1]), (x, outputs[2])])
        .expect("a program")
}

fn maps_that_are_launched_together_give_the_bits_of_maps_launched_by_themselves(device: &Device) {
    use DType::{BF16, F16, F32, U8};
    let programs = [
        program([F32, F32], [F32, F32, F32]),
        program([BF16, F32], [F32, BF16, BF16]),
        program([U8, F16], [BF16, U8, F16]),
    ];
    let dtypes = [[F32, F32], [BF16, F32], [U8, F16]];
    let mut kernels: Vec<Kernel> = vec![];
    for (k, elements) in SIZES.into_iter().enumerate() {
        for (program, dtypes) in programs.iter().zip(dtypes) {
            // One is not aligned, and goes by itself.
            let offset = [0, 8, 0, 1, 4][k % 5];
            let inputs = dtypes.map(|dtype| MapInput {
                view: view(device, dtype, elements, offset, k),
                window: None,
            });
            kernels.push(
                MapCall {
                    op: "steps",
                    program: program.clone(),
                    shape: [elements].into(),
                    inputs: inputs.into_iter().collect(),
                    indices: Default::default(),
                    params: [(0.5 + (k / 5) as f64).into()].into_iter().collect(),
                }
                .into(),
            );
        }
    }
    let together = device.launch_all(kernels.clone()).expect("launches");
    assert_eq!(together.len(), kernels.len());
    for (kernel, together) in kernels.into_iter().zip(together) {
        let alone = device.launch(kernel).expect("launches");
        assert_eq!(together.len(), alone.len());
        for (a, b) in together.iter().zip(&alone) {
            assert_eq!((a.dtype, &a.layout), (b.dtype, &b.layout));
            let bytes = a.layout.shape.numel() * a.dtype.size();
            let read = |view: &View| {
                pollster::block_on(device.backend().download(&view.buffer, 0..bytes))
                    .expect("downloads")
            };
            assert!(read(a) == read(b), "{} of {:?}", a.dtype, a.layout.shape);
        }
    }
}
