//! Attention over cut heads and cut queries.

use super::*;
use anymesh_core::ops::{AttentionOptions, attention::attention_backward};

const CAUSAL: AttentionOptions = AttentionOptions {
    scale: None,
    causal: true,
    mask: None,
    documents: None,
};

#[test]
fn attention_over_cut_heads_needs_no_communication() {
    let mesh = mesh("tp=2");
    // (query heads, key heads, how keys lie): heads cut alike, or one key head that all queries
    // share.
    for (hq, hk, keys) in [
        (4, 2, "[_, @tp, _, _]"),
        (4, 4, "[_, @tp, _, _]"),
        (4, 1, "[_, _, _, _]"),
    ] {
        let (q, k, v) = (
            numbers(&[2, hq, 3, 4]),
            numbers(&[2, hk, 5, 4]),
            numbers(&[2, hk, 5, 2]),
        );
        let plain = q.attention(&k, &v, &CAUSAL).unwrap();
        let (sq, sk, sv) = (
            q.to_mesh(&mesh, "[_, @tp, _, _]").unwrap(),
            k.to_mesh(&mesh, keys).unwrap(),
            v.to_mesh(&mesh, keys).unwrap(),
        );
        let (done, steps) = traffic(|| sq.attention(&sk, &sv, &CAUSAL).unwrap());
        assert_eq!(
            (
                done.out.type_string().as_str(),
                done.lse.type_string().as_str()
            ),
            ("f32[2, 4@tp, 3, 2]", "f32[2, 4@tp, 3]")
        );
        assert_eq!(steps, []);
        assert_same("out", &done.out, &plain.out, false);
        assert_same("lse", &done.lse, &plain.lse, false);
    }
}

#[test]
fn causal_queries_may_be_cut_and_their_keys_get_partial_gradients() {
    let mesh = mesh("sp=3");
    for (s, t) in [(6, 6), (5, 7), (7, 4), (2, 4)] {
        let (q, k, v) = (
            numbers(&[1, 2, s, 4]),
            numbers(&[1, 1, t, 4]),
            numbers(&[1, 1, t, 2]),
        );
        let grad = numbers(&[1, 2, s, 2]);
        let plain = q.attention(&k, &v, &CAUSAL).unwrap();
        let (dq, dk, dv) = attention_backward(&q, &k, &v, &plain, &grad, &CAUSAL).unwrap();
        let cut = |t: &Tensor| t.to_mesh(&mesh, "[_, _, @sp, _]").unwrap();
        let whole = |t: &Tensor| t.to_mesh(&mesh, "[_, _, _, _]").unwrap();
        let (sq, sk, sv) = (cut(&q), whole(&k), whole(&v));
        let ((done, (eq, ek, ev)), steps) = traffic(|| {
            let done = sq.attention(&sk, &sv, &CAUSAL).unwrap();
            let back = attention_backward(&sq, &sk, &sv, &done, &cut(&grad), &CAUSAL).unwrap();
            (done, back)
        });
        assert_eq!(steps, []);
        assert_eq!(ek.type_string(), format!("f32[1, 1, {t}, 4]{{sum:sp}}"));
        assert_eq!(eq.type_string(), format!("f32[1, 2, {s}@sp, 4]"));
        for (sharded, plain) in [
            (&done.out, &plain.out),
            (&done.lse, &plain.lse),
            (&eq, &dq),
            (&ek, &dk),
            (&ev, &dv),
        ] {
            assert_same("causal", sharded, plain, false);
        }
    }
}
