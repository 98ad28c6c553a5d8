//! Every message once, and the way back to the line.

use crate::array::{Array, Counting, region};
use anymesh_checkpoint::map::{Mapped, Mapping, Options};
use anymesh_checkpoint::{Error, Source};
use anymesh_core::DType;
use std::collections::BTreeMap;

fn sources() -> BTreeMap<String, Array> {
    let mut out: BTreeMap<String, Array> = ["a", "b", "l.0.w", "l.1.w", "x.0.e.1"]
        .map(|name| (name.to_string(), Array::counting(DType::F32, &[4, 6], 0)))
        .into();
    out.insert("half".into(), Array::counting(DType::F16, &[4, 6], 0));
    out.insert("int".into(), Array::counting(DType::I32, &[4, 6], 0));
    out.insert("small".into(), Array::counting(DType::F32, &[2, 3], 0));
    out
}

fn error(text: &str, options: &Options) -> Error {
    match Mapping::parse(text)
        .and_then(|mapping| Mapped::new(Counting::new(&sources()), &mapping, options))
    {
        Ok(_) => panic!("this was taken: {text}"),
        Err(error) => error,
    }
}

fn refused(cases: &[(&str, &str)], options: &Options) {
    for (text, expected) in cases {
        let error = error(text, options);
        assert!(error.to_string().contains(expected), "{text}\n{error}");
        assert!(
            matches!(error, Error::Mapping { line, .. } if line == text.lines().count()),
            "{text}\n{error:?}"
        );
    }
}

#[test]
fn text_that_is_no_statement_is_refused_at_its_column() {
    let cases = [
        ("a -> 'b", "column 6: this quote is not closed"),
        ("a ; b", "column 3: ';' means nothing here"),
        (
            "a -> b, axis=99999999999999999999",
            "column 14: the number 99999999999999999999 is too large",
        ),
        ("a -> -1b", "'-1b' is no number"),
        (
            "# all well\na ->",
            "a name was expected, not the end of the statement",
        ),
        (
            "a -> 7",
            "not the number 7; a name that is a number is written in quotes",
        ),
        ("-> a", "a name was expected, not '->'"),
        ("a b -> c", "column 3: '->' was expected, not 'b'"),
        ("a -> b, c -> d", "a second '->' in one statement"),
        (
            "a -> b, axis=0 fused_ffn",
            "a comma, which is missing before 'fused_ffn'",
        ),
        (
            "a -> b, axis=0, c",
            "an attribute (key=value) or one of fused_qkv, fused_qkv_old, fused_ffn was expected, not 'c'",
        ),
        ("_[0:1] -> b", "'_' stands for no tensor"),
        (
            "c[-1:2] -> b",
            "a number from 0 was expected in NAME[first:end], not '-1'",
        ),
        ("c[0,2] -> b", "':' was expected, not ','"),
        (
            "a -> b, axes=0",
            "column 9: there is no attribute 'axes'; there are axis, sizes",
        ),
        ("a -> b, axis='0'", "axis= takes a number, not \"0\""),
        ("a -> b, permute='1,0'", "permute= takes numbers such as"),
        ("a -> b, permute=[1 0]", "',' was expected, not '0'"),
        (
            "a -> b, permute=[x]",
            "a number was expected in the list, not 'x'",
        ),
        (
            "a -> b, dtype='float33'",
            "dtype='float33' is no element type here; there are bool, u8,",
        ),
        (
            "a -> b, dtype='uint16'",
            "'uint16' is how Paddle calls bfloat16 in NumPy arrays",
        ),
        ("a -> b, dtype=5", "dtype= takes an element type such as"),
    ];
    refused(&cases, &Options::default());
    let Error::Mapping { trace, .. } = error("a -> b\nx ;", &Options::default()) else {
        panic!("an error of the mapping")
    };
    assert_eq!(trace, "  x ;\n    ^");
}

#[test]
fn macros_that_cannot_be_expanded_are_refused() {
    let cases = [
        (
            "l.$LAYER.w -> b",
            "after '$' stands LAYER_ID, EXPERT_ID or LAYER_ID_OFFSET",
        ),
        ("k.$LAYER_ID.w -> b", "no tensor's name fits the pattern"),
        (
            "l.$LAYER_ID.w, l.$EXPERT_ID.w -> b, axis=0",
            "no name of the statement has all of its ids",
        ),
        (
            "l.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w",
            "layer 0 has no layer before it",
        ),
        ("c[2:2] -> b, axis=0", "the range [2:2] is empty"),
        (
            "c[0:70000] -> b, axis=0",
            "a range of more than 65536 names",
        ),
        ("x.*.e.* -> c, axis=0", "one * per name"),
        (
            "k.*.w -> c, axis=0",
            "no name with a number for * the source has",
        ),
        (
            "a -> k.*.w, axis=0",
            "no name with a number for * is known of the destination",
        ),
        (
            "a -> b, fused_ffn, fused_qkv",
            "one fused macro per statement",
        ),
        (
            "a -> b, fused_ffn, axis=0, axis=1",
            "axis= may be given once",
        ),
        (
            "a -> b, fused_qkv, num_heads=2, num_key_value_groups=1",
            "fused_qkv joins query, key and value (3 names) with one fused tensor; here are 1 -> 1",
        ),
        (
            "a, b -> c, d, fused_ffn",
            "fused_ffn joins gate and up (2 names) with one fused tensor, or one fused tensor with one; here are 2 -> 2",
        ),
        ("a -> q, k, v, fused_qkv", "fused_qkv needs num_heads="),
        (
            "a -> q, k, v, fused_qkv, num_heads=0, num_key_value_groups=1",
            "num_heads=0 must be at least 1",
        ),
        (
            "a -> q, k, v, fused_qkv, num_heads=99999999, num_key_value_groups=1",
            "more than 4096 parts",
        ),
        (
            "a -> q, k, v, fused_qkv, num_heads=3, num_key_value_groups=2",
            "num_heads=3 is no multiple of num_key_value_groups=2",
        ),
        (
            "a -> a, fused_qkv_old, num_heads=4, num_key_value_groups=2, dst_degree=4",
            "2 parts cannot be dealt to a tensor-parallel degree of 4",
        ),
    ];
    refused(&cases, &Options::default());
}

#[test]
fn statements_that_say_too_much_or_too_little_are_refused() {
    let cases = [
        ("a, _ -> b, axis=0", "'_' stands alone on its side"),
        ("_ -> _", "'_ -> _' says nothing"),
        ("a -> _, axis=0", "a statement with '_' takes no attributes"),
        (
            "a, b -> c, d, axis=0",
            "2 names to 2: one side must be a single tensor",
        ),
        ("a, b -> c", "to join 2 tensors, say along which dimension"),
        (
            "a -> c, d",
            "to cut into 2 tensors, say along which dimension: axis= (to copy, write a statement for each)",
        ),
        (
            "a -> c, d, axis=0, sizes=[1,2,1]",
            "sizes= has 3 numbers for 2 parts",
        ),
        ("a -> c, d, axis=0, axis=1", "axis= may be given once"),
        ("a -> c, c, axis=0", "'c' is written twice"),
        ("a -> c, d, axis=0, sizes=[5,-1]", "a size is not negative"),
        (
            "a -> c, permute=[0,2]",
            "is no order of the dimensions 0 to 1",
        ),
        (
            "a -> c, num_heads=4",
            "num_heads= is for fused_qkv, fused_qkv_old and fused_ffn only",
        ),
        (
            "a -> c, src_dtype=f32",
            "src_dtype= and dst_dtype= come together",
        ),
        (
            "a -> c, dst_shape=[24]",
            "src_shape= and dst_shape= come together",
        ),
        ("a -> c, sizes=[4]", "sizes= belongs to axis="),
    ];
    refused(&cases, &Options::default());
}

#[test]
fn tensors_that_do_not_fit_a_statement_are_refused() {
    let many_casts = "half -> half, dtype=f32\nhalf -> half, dtype=f16\n".repeat(251);
    let doubled = "half, half -> half, axis=0\nhalf, half -> half, axis=1\n".repeat(31);
    let cases = [
        (
            "none -> c",
            "there is no tensor 'none': it is not in the source, and no statement before writes it",
        ),
        (
            "_ -> n\nn -> m",
            "'n' was only added, in line 1, and has no values to read",
        ),
        ("a -> _\na -> m", "'a' was removed in line 1"),
        (
            "a -> c\nb -> c",
            "'c' is written twice: line 1 wrote it, and none read it since",
        ),
        ("_ -> c\nb -> c", "'c' is written twice: line 1"),
        (
            "a -> b",
            "the source has a tensor 'b' that no statement read so far, and this would replace it; `b -> _` drops it",
        ),
        (
            "a, half -> c, axis=0",
            "f32 and f16 cannot be joined: cast one of them before axis=",
        ),
        (
            "a, small -> c, axis=0",
            "shapes [4, 6] and [2, 3] cannot be joined along dimension 0",
        ),
        (
            "a, b -> c, axis=0, sizes=[3,5]",
            "sizes says [3, 5], the parts are [4, 4] long",
        ),
        (
            "a -> c, d, e, axis=0",
            "dimension 0 of [4, 6] cannot be cut into 3 equal parts; sizes=",
        ),
        (
            "a -> c, d, axis=0, sizes=[1,2]",
            "sizes [1, 2] do not add up to dimension 0 of [4, 6]",
        ),
        (
            "a -> c, d, axis=-3",
            "axis=-3 is no dimension of the shape [4, 6]",
        ),
        (
            "a -> c, permute=[2,0,1]",
            "is for rank 3, the tensor is [4, 6]",
        ),
        (
            "a -> c, reshape=[5,-1]",
            "the shape [4, 6] cannot become [5, -1]",
        ),
        ("a -> c, reshape=[9223372036854775807,9]", "is too large"),
        (
            "a -> c, src_dtype=f16, dst_dtype=f32",
            "src_dtype says f16, the tensor is f32",
        ),
        (
            "a -> c, src_shape=[6,4], dst_shape=[24]",
            "src_shape says [6, 4], the tensor is [4, 6]",
        ),
        (doubled.as_str(), "is too large"),
        (
            many_casts.as_str(),
            "more than 100 operations one after the other on one tensor",
        ),
    ];
    for (text, expected) in cases {
        let error = error(text, &Options::default());
        assert!(
            error.to_string().contains(expected),
            "{}\n{error}",
            &text[..text.len().min(80)]
        );
        assert!(matches!(error, Error::Mapping { .. }));
    }
}

#[test]
fn what_has_no_inverse_says_why() {
    let cases = [
        (
            "a -> c\na -> d",
            "this has no inverse: 'a' is used twice, also by line 1",
        ),
        (
            "a -> _",
            "this has no inverse: the values of 'a' are not kept; with `_ -> a` the other side has a tensor of its own",
        ),
        (
            "a -> c, dtype=bf16",
            "this has no inverse: it does not say what was cast to bf16; write src_dtype= and dst_dtype=",
        ),
        (
            "a -> c, reshape=[24]",
            "this has no inverse: it does not say the shape before; write src_shape= and dst_shape=",
        ),
    ];
    refused(
        &cases,
        &Options {
            reverse: true,
            ..Options::default()
        },
    );
    let both = Mapping::parse("n -> _\n_ -> n\na -> c").expect("statements");
    let mut there = sources();
    there.insert("n".into(), Array::counting(DType::F32, &[1], 0));
    let array = there.remove("a").expect("it is there");
    there.insert("c".into(), array);
    let mapped = Mapped::new(
        Counting::new(&there),
        &both,
        &Options {
            reverse: true,
            ..Options::default()
        },
    )
    .expect("added on both sides");
    assert!(mapped.recipe().added().contains("n") && mapped.tensors().contains_key("a"));
}

#[test]
fn destinations_and_sources_must_meet() {
    let to = |names: &[&str]| Options {
        destination: Some(names.iter().map(|name| (name.to_string(), 1)).collect()),
        ..Options::default()
    };
    let mapping = |options: &Options| {
        Mapped::new(
            Counting::new(&sources()),
            &Mapping::parse("a -> c").expect("a statement"),
            options,
        )
    };
    let error = mapping(&to(&["c"]))
        .err()
        .expect("others are used by nobody");
    assert_eq!(error, Error::NotUsed { name: "b".into() });
    let only = Options {
        only_mapped: true,
        ..to(&["c"])
    };
    assert_eq!(
        mapping(&only).expect("others are dropped").tensors().len(),
        1
    );
    let error = mapping(&Options {
        only_mapped: true,
        ..to(&["c", "d"])
    })
    .err()
    .expect("d comes from nowhere");
    assert_eq!(error, Error::NotMade { name: "d".into() });
}

#[test]
fn regions_outside_are_refused() {
    let mapped = Mapped::new(
        Counting::new(&sources()),
        &Mapping::parse("a -> c").expect("a statement"),
        &Options::default(),
    )
    .expect("maps");
    for (start, shape) in [
        (&[0, 5][..], &[1, 2][..]),
        (&[0], &[1]),
        (&[usize::MAX, 0], &[2, 1]),
    ] {
        let error = mapped
            .read("c", &region(start, shape), &mut [0; 8])
            .expect_err("outside");
        let expected = Error::OutOfBounds {
            tensor: "c".into(),
            whole: vec![4, 6],
            start: start.to_vec(),
            shape: shape.to_vec(),
        };
        assert_eq!(error, expected);
    }
    let error = mapped
        .read("c", &region(&[0, 0], &[1, 1]), &mut [0; 8])
        .expect_err("too many bytes");
    let expected = Error::ByteCount {
        tensor: "c".into(),
        expected: 4,
        given: 8,
    };
    assert_eq!(error, expected);
    assert!(matches!(
        mapped.read("a", &region(&[0, 0], &[1, 1]), &mut [0; 4]),
        Err(Error::Missing { .. })
    ));
    assert!(matches!(
        mapped.recipe().pieces("a", &region(&[0, 0], &[1, 1])),
        Err(Error::Missing { .. })
    ));
}

#[test]
fn an_error_shows_the_way_from_the_line_through_every_macro() {
    let text = "# two layers\na -> c\nl.$LAYER_ID.w^T -> g.$LAYER_ID, u.$LAYER_ID, fused_ffn, src_degree=3";
    let error = error(text, &Options::default());
    let expected = "mapping line 3: dimension 1 of [6, 4] cannot be cut into 6 equal parts; sizes= gives the sizes of uneven ones\n\
        \x20 written: l.$LAYER_ID.w^T -> g.$LAYER_ID, u.$LAYER_ID, fused_ffn, src_degree=3\n\
        \x20 by ids: l.0.w^T -> g.0, u.0, fused_ffn, src_degree=3\n\
        \x20 by ^T: l.0.w_transpose_tmp -> g.0, u.0, fused_ffn, src_degree=3\n\
        \x20 by fused: l.0.w_transpose_tmp -> fused_ffn_tmp.GATE_0, fused_ffn_tmp.UP_0, fused_ffn_tmp.GATE_1, fused_ffn_tmp.UP_1, fused_ffn_tmp.GATE_2, fused_ffn_tmp.UP_2, axis=1";
    assert_eq!(error.to_string(), expected);
}
