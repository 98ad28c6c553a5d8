//! Throughput of kernels on one device, and the host's cost of a small op: the rows of
//! `anymesh_bench::kernels`.
//!
//! Prints one JSON object a line: `{"name": .., "us": .., "host_us": .., "bytes": .., "flops": ..}`.
//! `benches/peers/` runs this and the peer in one go and prints the ratios:
//!
//! ```text
//! cargo bench --bench kernels --features cuda -- cuda:0
//! python3 benches/peers/torch_kernels.py target/release/deps/kernels-* cuda:0 attention
//! python3 benches/peers/numpy_cpu.py target/release/deps/kernels-*
//! ```

use anymesh_bench::{
    Result,
    kernels::{Sizes, measure},
};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let device = anymesh::device(arguments.first().map_or("cpu", String::as_str))?;
    let filter = arguments.get(1).map(String::as_str);
    eprintln!("{device}: {}", device.backend().capabilities().description);
    measure(&device, Sizes::of(&device), filter, &mut |row| {
        println!("{row}");
    })
}
