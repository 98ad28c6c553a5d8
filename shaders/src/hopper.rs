//! What kernels for Hopper's tensor cores have in common: addresses, copies that do not wait, and how
//! the tensor cores are told where operands lie. CubeCL has no words for these, so they are PTX.

use anymesh_kernel::DType;
use cubecl::prelude::*;

/// Registers in PTX: `count` of them from `from` on.
pub(crate) fn registers(from: usize, count: usize) -> Vec<String> {
    (from..from + count).map(|i| format!("%{i}")).collect()
}

/// Makes the first `count` registers, which are results, those that follow, which are operands.
pub(crate) fn moves(count: usize) -> String {
    let pairs = registers(0, count).into_iter().zip(registers(count, count));
    (pairs.map(|(to, from)| format!("mov.f32 {to}, {from};\n"))).collect()
}

/// How the tensor cores find a panel at an address in shared memory: lines of 128 bytes, swizzled,
/// in groups of eight; where lines lie across the summed dimension, the next 64 elements of each are
/// `between` bytes further.
#[cube]
pub(crate) fn descriptor(at: u32, #[comptime] between: usize) -> u64 {
    let rest = comptime!(((between / 16).max(1) as u64) << 16 | 64u64 << 32 | 1u64 << 62);
    u64::cast_from((at & 0x3ffffu32) >> 4u32) | rest
}

/// The product of types that the instructions name.
pub(crate) fn kind(dtype: DType) -> &'static str {
    if dtype == DType::F16 { "f16" } else { "bf16" }
}

/// Where a slice of shared memory lies in it.
#[cube]
pub(crate) fn shared_address(memory: &[u32]) -> u32 {
    let pointer = unsafe { memory.as_ptr_unchecked() };
    let out: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {o}, t; }}",
        o = out(_) out, p = in(_) pointer, options(nomem)
    );
    out
}

/// Where a buffer lies.
#[cube]
pub(crate) fn address(memory: &[u32]) -> u64 {
    let pointer = unsafe { memory.as_ptr_unchecked() };
    let out: u64;
    gpu_asm!("mov.u64 {o}, {p};", o = out(_) out, p = in(_) pointer, options(nomem));
    out
}

/// Where a buffer lies that is written to.
#[cube]
pub(crate) fn address_mut(memory: &mut [u32]) -> u64 {
    let pointer = unsafe { memory.as_mut_ptr_unchecked() };
    let out: u64;
    gpu_asm!("mov.u64 {o}, {p};", o = out(_) out, p = in(_) pointer, options(nomem));
    out
}

/// Begins to bring 16 bytes to shared memory; zeros where `bytes` is 0.
#[cube]
pub(crate) fn bring(to: u32, from: u64, bytes: u32) {
    let (to, from, bytes) = (held::<u32>(to), held::<u64>(from), held::<u32>(bytes));
    gpu_asm!(
        "cp.async.cg.shared.global [{to}], [{from}], 16, {bytes};",
        to = in(_) to, from = in(_) from, bytes = in(_) bytes
    );
}

/// Begins to bring 4 bytes to shared memory; zeros where `bytes` is 0.
#[cube]
pub(crate) fn bring_word(to: u32, from: u64, bytes: u32) {
    let (to, from, bytes) = (held::<u32>(to), held::<u64>(from), held::<u32>(bytes));
    gpu_asm!(
        "cp.async.ca.shared.global [{to}], [{from}], 4, {bytes};",
        to = in(_) to, from = in(_) from, bytes = in(_) bytes
    );
}

/// Makes a barrier at an address in shared memory: each of its turns ends once `count` have arrived.
#[cube]
pub(crate) fn make_barrier(at: u32, #[comptime] count: usize) {
    let at = held::<u32>(at);
    gpu_asm!("mbarrier.init.shared::cta.b64 [{at}], {count};", at = in(_) at);
}

/// Arrives at a barrier once for each warp.
#[cube]
pub(crate) fn arrive(at: u32) {
    let (at, lane) = (held::<u32>(at), held::<u32>(UNIT_POS % 32u32));
    gpu_asm!(
        "{{ .reg .pred p; setp.eq.u32 p, {lane}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{at}]; }}",
        at = in(_) at, lane = in(_) lane
    );
}

/// Arrives at a barrier when all that this thread began to bring is there.
#[cube]
pub(crate) fn arrive_brought(at: u32) {
    let at = held::<u32>(at);
    gpu_asm!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{at}];", at = in(_) at);
}

/// Waits until a barrier's turn ends: its turns are 0 and 1, again and again, and that before the
/// first has ended.
#[cube]
pub(crate) fn wait_for(at: u32, turn: u32) {
    let (at, turn) = (held::<u32>(at), held::<u32>(turn));
    gpu_asm!(
        "{{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [{at}], {turn};\n@!p bra again; }}",
        at = in(_) at, turn = in(_) turn
    );
}

/// What was brought to shared memory is for the tensor cores to read from here on.
#[cube]
pub(crate) fn see_brought() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Takes registers for a warp group, or gives some away: it has so many a thread then.
#[cube]
pub(crate) fn resize_registers(#[comptime] count: u32, #[comptime] more: bool) {
    let way = comptime!(if more { "inc" } else { "dec" });
    gpu_asm!("setmaxnreg.{way}.sync.aligned.u32 {count};");
}

/// What a variable holds now.
#[cube]
pub(crate) fn now<T: Scalar, N: Size>(vector: &Vector<T, N>) -> Vector<T, N> {
    intrinsic!(|scope| vector.read_value(scope).into())
}

/// What a number holds now: what an instruction in PTX gave is a variable, and those are passed to
/// the next one by their address.
#[cube]
pub(crate) fn held<T: CubePrimitive>(value: T) -> T {
    intrinsic!(|scope| value.read_value(scope).into())
}

/// Two values in a word.
#[cube]
pub(crate) fn pack(low: f32, high: f32, #[comptime] dtype: DType) -> u32 {
    let kind = comptime!(if dtype == DType::F16 {
        "f16x2"
    } else {
        "bf16x2"
    });
    let (low, high) = (held::<f32>(low), held::<f32>(high));
    let out: u32;
    gpu_asm!(
        "cvt.rn.{kind}.f32 {o}, {high}, {low};",
        o = out(_) out, low = in(_) low, high = in(_) high, options(pure, nomem)
    );
    held::<u32>(out)
}

/// One of the two values in a word.
#[cube]
pub(crate) fn unpack(word: u32, #[comptime] high: bool, #[comptime] dtype: DType) -> f32 {
    if comptime!(dtype == DType::F16) {
        let text = comptime!(format!(
            "{{ .reg .b16 h, t; mov.b32 {{{}}}, %1; cvt.f32.f16 %0, h; }}",
            if high { "t, h" } else { "h, t" }
        ));
        let word = held::<u32>(word);
        let out: f32;
        gpu_asm!("{text} // {o} {w}", o = out(_) out, w = in(_) word, options(nomem));
        held::<f32>(out)
    } else if comptime!(high) {
        f32::reinterpret(word & 0xffff_0000u32)
    } else {
        f32::reinterpret(word << 16u32)
    }
}

/// Trades words with the thread whose number differs by `bit`: the lower one has both first words
/// then, the upper one both second ones.
#[cube]
pub(crate) fn trade(x: u32, y: u32, lane: usize, #[comptime] bit: u32) -> (u32, u32) {
    let upper = (lane as u32 & bit) != 0u32;
    let got = plane_shuffle_xor(select(upper, x, y), bit);
    (select(upper, got, x), select(upper, y, got))
}

/// Stores 16 bytes.
#[cube]
pub(crate) fn put4(at: u64, a: u32, b: u32, c: u32, d: u32) {
    gpu_asm!(
        "st.global.v4.b32 [{at}], {{{a}, {b}, {c}, {d}}};",
        at = in(_) at, a = in(_) a, b = in(_) b, c = in(_) c, d = in(_) d
    );
}

/// Reads 16 bytes.
#[cube]
pub(crate) fn get4(at: u64) -> Vector<u32, Const<4>> {
    let text = comptime!(String::from("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"));
    let at = held::<u64>(at);
    let out: Vector<u32, Const<4>>;
    gpu_asm!("{text} // {o} {a}", o = out(_) out, a = in(_) at);
    now(&out)
}

/// Reads two floats from shared memory.
#[cube]
pub(crate) fn get2_shared(at: u32) -> Vector<f32, Const<2>> {
    let text = comptime!(String::from("ld.shared.v2.f32 {%0, %1}, [%2];"));
    let at = held::<u32>(at);
    let out: Vector<f32, Const<2>>;
    gpu_asm!("{text} // {o} {a}", o = out(_) out, a = in(_) at);
    now(&out)
}

/// Stores a float.
#[cube]
pub(crate) fn put1(at: u64, a: f32) {
    let (at, a) = (held::<u64>(at), held::<f32>(a));
    gpu_asm!("st.global.f32 [{at}], {a};", at = in(_) at, a = in(_) a);
}

/// Stores two floats.
#[cube]
pub(crate) fn put2(at: u64, a: f32, b: f32) {
    gpu_asm!(
        "st.global.v2.f32 [{at}], {{{a}, {b}}};",
        at = in(_) at, a = in(_) a, b = in(_) b
    );
}

/// 2 to the power of a value, by the hardware: right to two ulp.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("ex2.approx.ftz.f32 {o}, {x};", o = out(_) out, x = in(_) x, options(nomem));
    held::<f32>(out)
}
