//! Random programs on the host. `tests/device/` has them on any device.

mod hold;

#[test]
fn a_thousand_random_programs_give_the_bits_and_the_errors_of_eager_ones() {
    let first = std::env::var("ANYMESH_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    let first = first.unwrap_or(0);
    hold::hold(
        &anymesh_backend_cpu::device(),
        first..first + 1000,
        1,
        false,
    );
}
