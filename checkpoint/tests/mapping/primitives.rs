//! Each statement against the same in loops.

use crate::array::{Array, Counting, arrays};
use anymesh_checkpoint::map::{Mapped, Mapping, Names, Options};
use anymesh_checkpoint::{Error, Memory, Source, TensorInfo};
use anymesh_core::{DType, Tensor};
use std::collections::BTreeMap;

fn a(dtype: DType, shape: &[usize]) -> Array {
    Array::counting(dtype, shape, 3)
}

fn b(dtype: DType, shape: &[usize]) -> Array {
    Array::counting(dtype, shape, 11)
}

fn check_with(
    text: &str,
    sources: BTreeMap<String, Array>,
    options: &Options,
    expected: BTreeMap<String, Array>,
) {
    let mapping = Mapping::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let mapped = Mapped::new(Counting::new(&sources), &mapping, options)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        mapped.tensors().keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "{text}"
    );
    for (name, array) in &expected {
        assert_eq!(
            mapped.info(name).expect("it is there"),
            &array.info(),
            "{text}: {name}"
        );
        assert_eq!(
            mapped.read_all(name).expect("reads"),
            array.bytes(),
            "{text}: {name}"
        );
    }
}

fn check<const N: usize, const M: usize>(
    text: &str,
    sources: [(&str, Array); N],
    expected: [(&str, Array); M],
) {
    check_with(text, arrays(sources), &Options::default(), arrays(expected));
}

#[test]
fn a_name_becomes_another_and_others_stay() {
    let x = a(DType::F32, &[2, 3]);
    check(
        "a -> b  # a comment",
        [("a", x.clone()), ("c", x.clone())],
        [("b", x.clone()), ("c", x.clone())],
    );
    check(
        "a -> b\na -> c",
        [("a", x.clone())],
        [("b", x.clone()), ("c", x.clone())],
    );
    check(
        "a -> t\nb -> a\nt -> b",
        [("a", x.clone()), ("b", b(DType::F16, &[4]))],
        [("b", x.clone()), ("a", b(DType::F16, &[4]))],
    );
    check(
        "'odd name, [1]' -> \"x->y\"",
        [("odd name, [1]", x.clone())],
        [("x->y", x.clone())],
    );
    check(
        "0.weight -> params/w-1",
        [("0.weight", x.clone())],
        [("params/w-1", x.clone())],
    );
    let only = Options {
        only_mapped: true,
        ..Options::default()
    };
    check_with(
        "a -> b",
        arrays([("a", x.clone()), ("c", x.clone())]),
        &only,
        arrays([("b", x)]),
    );
}

#[test]
fn tensors_are_joined_and_cut() {
    let (x, y) = (a(DType::BF16, &[2, 3]), b(DType::BF16, &[2, 5]));
    check(
        "a, b -> c, axis=1",
        [("a", x.clone()), ("b", y.clone())],
        [("c", Array::join(&[x.clone(), y.clone()], 1))],
    );
    check(
        "a, b -> c,\n   axis=-1",
        [("a", x.clone()), ("b", y.clone())],
        [("c", Array::join(&[x.clone(), y.clone()], 1))],
    );
    check(
        "a, a -> c, axis=0",
        [("a", x.clone())],
        [("c", Array::join(&[x.clone(), x.clone()], 0))],
    );
    check("a -> c, axis=0", [("a", x.clone())], [("c", x.clone())]);
    let parts = a(DType::F64, &[6, 2]).cut(0, &[2, 2, 2]);
    check(
        "a -> p[0:3], axis=0",
        [("a", a(DType::F64, &[6, 2]))],
        [
            ("p_0", parts[0].clone()),
            ("p_1", parts[1].clone()),
            ("p_2", parts[2].clone()),
        ],
    );
    let parts = a(DType::F64, &[2, 6]).cut(1, &[1, 0, 5]);
    let expected = [
        ("x", parts[0].clone()),
        ("y", parts[1].clone()),
        ("z", parts[2].clone()),
    ];
    check(
        "a -> x, y, z, axis=1, sizes=\"[1, 0, 5]\"",
        [("a", a(DType::F64, &[2, 6]))],
        expected,
    );
}

#[test]
fn dimensions_change_places_and_shape() {
    let x = a(DType::F32, &[2, 3, 4]);
    check(
        "a -> a, permute=\"[2,0,1]\"",
        [("a", x.clone())],
        [("a", x.permute(&[2, 0, 1]))],
    );
    check(
        "a -> a, permute=\"[]\"",
        [("a", x.clone())],
        [("a", x.permute(&[2, 1, 0]))],
    );
    check(
        "a^T -> b",
        [("a", x.clone())],
        [("b", x.permute(&[2, 1, 0]))],
    );
    check(
        "a -> b^T",
        [("a", x.clone())],
        [("b", x.permute(&[2, 1, 0]))],
    );
    check(
        "a -> b, reshape=\"[6, -1]\"",
        [("a", x.clone())],
        [("b", x.reshape(&[6, 4]))],
    );
    check(
        "a -> b, reshape=[3, 8]",
        [("a", x.clone())],
        [("b", x.reshape(&[3, 8]))],
    );
    check(
        "a -> b, reshape=[]",
        [("a", a(DType::F32, &[1, 1]))],
        [("b", a(DType::F32, &[]))],
    );
    check(
        "a -> b, reshape=[0, 7]",
        [("a", a(DType::F32, &[3, 0]))],
        [("b", a(DType::F32, &[0, 7]))],
    );
}

#[test]
fn casts_know_types_by_all_their_names() {
    let x = a(DType::BF16, &[2, 3]);
    check(
        "a -> a, dtype=\"float32\"",
        [("a", x.clone())],
        [("a", x.cast(DType::F32))],
    );
    check(
        "a -> a, dtype='f64'",
        [("a", x.clone())],
        [("a", x.cast(DType::F64))],
    );
    check(
        "a -> a, src_dtype=\"bfloat16\", dst_dtype=\"float16\"",
        [("a", x.clone())],
        [("a", x.cast(DType::F16))],
    );
    check(
        "a -> a, dtype=\"float8_e4m3fn\"",
        [("a", x.clone())],
        [("a", x.cast(DType::F8E4M3))],
    );
    check(
        "a -> a, dtype=\"f8e5m2\"\na -> a, dtype='bf16'",
        [("a", a(DType::BF16, &[0]))],
        [("a", a(DType::BF16, &[0]))],
    );
}

/// Every type becomes every other by the rules of tensors: values that fit, that do not, and that
/// are between two.
#[test]
fn a_cast_of_any_type_to_any_other_is_that_of_a_tensor() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let values = [
        0.0,
        1.0,
        -1.0,
        2.5,
        -2.5,
        100.75,
        255.0,
        -300.0,
        70_000.0,
        -3e9,
        5e18,
        -1e30,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ];
    let doubles: Vec<u8> = values.iter().flat_map(|x: &f64| x.to_le_bytes()).collect();
    let doubles = Tensor::from_bytes(&doubles, DType::F64, [values.len()], &device)?;
    for from in DType::ALL {
        let x = doubles.cast(from)?;
        let mut source = Memory::default();
        let info = TensorInfo {
            dtype: from,
            shape: x.dims().to_vec(),
        };
        source.insert("s0", info, x.to_bytes()?)?;
        for to in DType::ALL {
            let mapping = Mapping::parse(&format!("s0 -> d0, dtype=\"{to}\""))?;
            let mapped = Mapped::new(&source, &mapping, &Options::default())?;
            assert_eq!(mapped.info("d0")?.dtype, to);
            let found =
                Tensor::from_bytes(&mapped.read_all("d0")?, to, x.shape().clone(), &device)?;
            let (found, expected) = (found.cast(DType::F64)?, x.cast(to)?.cast(DType::F64)?);
            let bits = |x: Tensor| -> Result<Vec<u64>, Error> {
                // Which NaN it is does not matter.
                let one = |v: f64| if v.is_nan() { u64::MAX } else { v.to_bits() };
                Ok(x.to_vec::<f64>()?.into_iter().map(one).collect())
            };
            assert_eq!(bits(found)?, bits(expected)?, "{from} to {to}");
        }
    }
    Ok(())
}

#[test]
fn several_attributes_act_in_the_order_they_are_written() {
    let (x, y) = (a(DType::F32, &[2, 6]), b(DType::F32, &[2, 6]));
    let sources = || [("a", x.clone()), ("b", y.clone())];
    let joined = Array::join(&[x.permute(&[1, 0]), y.permute(&[1, 0])], 0).cast(DType::BF16);
    check(
        "a, b -> c, permute=\"[1,0]\", axis=0, dtype=\"bf16\"",
        sources(),
        [("c", joined)],
    );
    let joined = Array::join(&[x.clone(), y.clone()], 0).permute(&[1, 0]);
    check(
        "a, b -> c, axis=0, permute=\"[1,0]\"",
        sources(),
        [("c", joined)],
    );
    let parts = x.reshape(&[3, 4]).cut(0, &[1, 2]);
    check(
        "a -> p, q, reshape=[3,4], axis=0, sizes=[1,2], permute=[1,0]",
        [("a", x.clone())],
        [
            ("p", parts[0].permute(&[1, 0])),
            ("q", parts[1].permute(&[1, 0])),
        ],
    );
}

#[test]
fn tensors_are_removed_and_added() {
    let x = a(DType::F32, &[2]);
    check(
        "a -> _\n_ -> new",
        [("a", x.clone()), ("b", x.clone())],
        [("b", x.clone())],
    );
    let mapping = Mapping::parse("_ -> new").expect("a statement");
    let mapped = Mapped::new(
        Counting::new(&BTreeMap::new()),
        &mapping,
        &Options::default(),
    )
    .expect("nothing to read");
    assert!(mapped.recipe().added().contains("new"));
}

#[test]
fn ids_are_found_on_temporary_names_and_on_either_side() {
    let x = a(DType::F32, &[2, 2]);
    let text = "h.$LAYER_ID.e.$EXPERT_ID.w -> t.$LAYER_ID.$EXPERT_ID\nt.$LAYER_ID.$EXPERT_ID^T -> m.$LAYER_ID.x.$EXPERT_ID";
    let sources: BTreeMap<_, _> = [(0, 1), (0, 10), (12, 3)]
        .map(|(l, e)| (format!("h.{l}.e.{e}.w"), x.clone()))
        .into();
    let expected: BTreeMap<_, _> = [(0, 1), (0, 10), (12, 3)]
        .map(|(l, e)| (format!("m.{l}.x.{e}"), x.permute(&[1, 0])))
        .into();
    check_with(text, sources.clone(), &Options::default(), expected.clone());
    // From the right, through the temporary name, without knowing the names on the left.
    check_with(
        text,
        expected,
        &Options {
            reverse: true,
            ..Options::default()
        },
        sources,
    );
}

#[test]
fn stars_count_by_number_and_offsets_count_down() {
    let part = |i: usize| Array::counting(DType::F32, &[1, 2], i);
    let sources: BTreeMap<_, _> = [0, 2, 10].map(|i| (format!("e.{i}.w"), part(i))).into();
    check_with(
        "e.*.w -> all, axis=0",
        sources,
        &Options::default(),
        arrays([("all", Array::join(&[part(0), part(2), part(10)], 0))]),
    );
    let cut = arrays([("all", Array::join(&[part(1), part(2)], 0))]);
    let destination = Some([("e.9".to_string(), 1), ("e.10".to_string(), 1)].into());
    check_with(
        "all -> e.*, axis=0",
        cut,
        &Options {
            destination,
            ..Options::default()
        },
        arrays([("e.9", part(1)), ("e.10", part(2))]),
    );
    check(
        "l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w",
        [("l.1.w", part(1)), ("l.2.w", part(2))],
        [("l.0.w", part(1)), ("l.1.w", part(2))],
    );
}

#[test]
fn fused_projections_go_there_and_back() {
    // Two query heads of two rows for each of two key-value groups.
    let heads: Vec<Array> = (0..8)
        .map(|i| Array::counting(DType::F32, &[3, 2], 5 * i))
        .collect();
    let [q, k, v] = [&heads[0..4], &heads[4..6], &heads[6..8]].map(|parts| Array::join(parts, 1));
    let grouped = Array::join(&[0, 1, 4, 6, 2, 3, 5, 7].map(|i| heads[i].clone()), 1);
    let tensors = || [("q", q.clone()), ("k", k.clone()), ("v", v.clone())];
    check(
        "q, k, v -> f, fused_qkv, num_heads=4, num_key_value_groups=2",
        tensors(),
        [("f", grouped.clone())],
    );
    check(
        "f -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2",
        [("f", grouped.clone())],
        tensors(),
    );
    // Degree 1: all queries, all keys, all values. Degree 2: the same per rank.
    let whole = Array::join(&[q.clone(), k.clone(), v.clone()], 1);
    check(
        "q, k, v -> f, fused_qkv_old, num_heads=4, num_key_value_groups=2",
        tensors(),
        [("f", whole.clone())],
    );
    check(
        "f -> f, fused_qkv_old, num_heads=4, num_key_value_groups=2, dst_degree=2",
        [("f", whole.clone())],
        [("f", grouped)],
    );
    // Gate and up in two blocks each, transposed and cast on the way.
    let [gate, up] = [&heads[0..2], &heads[2..4]].map(|parts| Array::join(parts, 1));
    let dealt = Array::join(&[0, 2, 1, 3].map(|i| heads[i].clone()), 1);
    check(
        "g, u -> f, fused_ffn, dst_degree=2",
        [("g", gate.clone()), ("u", up.clone())],
        [("f", dealt.clone())],
    );
    let text = "f^T -> g, u, fused_ffn, src_degree=2, permute=[1,0], dtype='f16'";
    let expected = [
        ("g", gate.cast(DType::F16).permute(&[1, 0])),
        ("u", up.cast(DType::F16).permute(&[1, 0])),
    ];
    check(text, [("f", dealt.permute(&[1, 0]))], expected);
}

#[test]
fn an_expanded_mapping_prints_as_one_that_reads_the_same() {
    let names = Names {
        left: [("l.0.w".to_string(), 1), ("l.1.w".to_string(), 1)].into(),
        ..Names::default()
    };
    let program = Mapping::parse(
        "l.$LAYER_ID.w^T -> \"to $LAYER\", x, axis=0, sizes=[1,2], dtype=bf16\n_ -> n\nk -> _",
    )
    .and_then(|m| m.expand(&names))
    .expect("expands");
    let text = program.to_string();
    let again = Mapping::parse(&text)
        .and_then(|m| m.expand(&names))
        .expect("reads back");
    assert_eq!(text, again.to_string());
    assert!(
        text.contains("l.1.w -> l.1.w_transpose_tmp, permute=\"[]\"\n"),
        "{text}"
    );
}
