//! What does not fit is refused, by name.

use anymesh_core::{DType, Tensor};
use anymesh_train::{
    Error, Pass, Result,
    objective::{
        Classification, Contrastive, Dpo, DpoLoss, GradCache, Grpo, Language, Pair, Prefix,
        Rollout, Temperature, advantages, classification, contrastive, dpo, grpo, language,
        language_in_chunks, matryoshka, normalised, regression, sequence_log_probs,
    },
};
use std::fmt::Debug;

fn floats(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &anymesh_backend_cpu::device()).expect("ones")
}

fn classes(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::I32, &anymesh_backend_cpu::device()).expect("zeros")
}

#[track_caller]
fn refused<T: Debug>(outcome: Result<T>, setting: &str, about: &str) {
    match outcome {
        Err(Error::Config { key, detail }) => {
            assert_eq!(key, setting, "{detail}");
            assert!(detail.contains(about), "{key}: {detail}");
        }
        other => panic!("{setting} should have been refused: {other:?}"),
    }
}

#[test]
fn of_labels() {
    let (logits, labels) = (floats(&[2, 3, 5]), classes(&[2, 3]));
    let ok = Language::default();
    refused(
        language(&logits, &classes(&[2, 4]), &ok),
        "labels",
        "[2, 4]",
    );
    refused(language(&logits, &floats(&[2, 3]), &ok), "labels", "f32");
    refused(language(&labels, &labels, &ok), "logits", "i32");
    let smoothing = 1.5;
    refused(
        language(&logits, &labels, &Language { smoothing, ..ok }),
        "smoothing",
        "1.5",
    );
    let z_loss = f64::NAN;
    refused(
        language(&logits, &labels, &Language { z_loss, ..ok }),
        "z_loss",
        "NaN",
    );
    let head = |h: &Tensor| Ok(h.clone());
    refused(
        language_in_chunks(&logits, &labels, head, 0, &ok),
        "chunk",
        "one position",
    );
    refused(
        language_in_chunks(&logits, &classes(&[3, 2]), head, 4, &ok),
        "labels",
        "[3, 2]",
    );
    refused(
        language_in_chunks(&floats(&[2, 0, 5]), &classes(&[2, 0]), head, 4, &ok),
        "hidden",
        "no positions",
    );
    refused(
        language_in_chunks(&floats(&[5]), &classes(&[]), head, 4, &ok),
        "hidden",
        "f32[5]",
    );
    let weighed = Classification {
        weight: Some(floats(&[4])),
        smoothing: 0.0,
    };
    refused(classification(&logits, &labels, &weighed), "weight", "[5]");
    refused(
        regression(&logits, &floats(&[2, 3])),
        "targets",
        "[2, 3, 5]",
    );
    refused(
        sequence_log_probs(&floats(&[2, 5]), &classes(&[2])),
        "labels",
        "i32[2]",
    );
    for count in [0.0, -1.0, f64::NAN] {
        refused(normalised(&floats(&[]), count), "count", "divided by");
    }
}

#[test]
fn of_representations() {
    let (queries, passages) = (floats(&[4, 8]), floats(&[8, 8]));
    let ok = || Contrastive {
        group: 2,
        ..Default::default()
    };
    assert!(contrastive(&queries, &passages, &ok()).is_ok());
    for bad in [0.0, -0.1, f64::NAN, f64::INFINITY] {
        let temperature = Temperature::Constant(bad);
        let options = Contrastive {
            temperature,
            ..ok()
        };
        refused(
            contrastive(&queries, &passages, &options),
            "temperature",
            "divided by",
        );
    }
    let options = Contrastive {
        temperature: Temperature::Learned(floats(&[2])),
        ..ok()
    };
    refused(
        contrastive(&queries, &passages, &options),
        "temperature",
        "f32[2]",
    );
    refused(
        contrastive(&queries, &floats(&[4, 8]), &ok()),
        "passages",
        "4 queries with 2 passages each",
    );
    refused(
        contrastive(&queries, &floats(&[8, 7]), &ok()),
        "passages",
        "[8, 8]",
    );
    refused(
        contrastive(&floats(&[4]), &passages, &ok()),
        "queries",
        "f32[4]",
    );
    refused(
        contrastive(&floats(&[0, 8]), &passages, &ok()),
        "queries",
        "f32[0, 8]",
    );
    refused(
        contrastive(&queries, &passages, &Contrastive { group: 0, ..ok() }),
        "group",
        "one passage",
    );
    let chunk = Some(0);
    refused(
        contrastive(&queries, &passages, &Contrastive { chunk, ..ok() }),
        "chunk",
        "one query",
    );
    let prefixes = |widths: &[usize]| matryoshka(&queries, &passages, &Prefix::all(widths), &ok());
    refused(prefixes(&[4, 9]), "prefixes", "no first 9");
    refused(prefixes(&[0]), "prefixes", "no first 0");
    refused(prefixes(&[]), "prefixes", "one width");
    let light = Prefix {
        width: 4,
        weight: -1.0,
    };
    refused(
        matryoshka(&queries, &passages, &[light], &ok()),
        "prefixes",
        "-1",
    );
}

#[test]
fn of_chunks() -> Result<()> {
    refused(GradCache::new(0), "chunk", "one row");
    let run = |sets: &[usize], rows: usize| {
        GradCache::new(4).and_then(|cache| {
            cache.run(
                sets,
                &Pass::eval(),
                |_, _| Ok(floats(&[rows, 3])),
                |found| Ok(found[0].sum_all()?),
                |_| Ok(()),
            )
        })
    };
    refused(run(&[4, 0], 4), "sets", "set 1");
    refused(run(&[4], 3), "encode", "f32[3, 3]");
    // An encoder that learns nothing.
    assert!(matches!(run(&[4], 4), Err(Error::Tensor(_))));
    Ok(())
}

#[test]
fn of_preferences() {
    let (two, three) = (floats(&[2]), floats(&[3]));
    let pair = |chosen, rejected| Pair { chosen, rejected };
    let good = pair(&two, &two);
    let ok = Dpo::default();
    refused(
        dpo(good, pair(&two, &three), &ok),
        "reference.rejected",
        "[2]",
    );
    refused(dpo(pair(&two, &three), good, &ok), "policy.rejected", "[2]");
    let wide = floats(&[2, 2]);
    refused(
        dpo(pair(&wide, &wide), good, &ok),
        "policy.chosen",
        "f32[2, 2]",
    );
    for beta in [0.0, -1.0, f64::NAN] {
        refused(dpo(good, good, &Dpo { beta, ..ok }), "beta", "above 0");
    }
    let smoothing = 0.1;
    let loss = DpoLoss::Ipo;
    refused(
        dpo(
            good,
            good,
            &Dpo {
                smoothing,
                loss,
                ..ok
            },
        ),
        "smoothing",
        "IPO",
    );
    let smoothing = -0.1;
    refused(
        dpo(good, good, &Dpo { smoothing, ..ok }),
        "smoothing",
        "-0.1",
    );
}

#[test]
fn of_groups_and_rollouts() {
    refused(advantages(&floats(&[4]), 1), "group", "a group of 1");
    refused(advantages(&floats(&[4]), 0), "group", "a group of 0");
    refused(advantages(&floats(&[5]), 2), "rewards", "groups of 2");
    refused(advantages(&floats(&[2, 2]), 2), "rewards", "f32[2, 2]");
    refused(advantages(&classes(&[4]), 2), "rewards", "i32");

    let (now, short, gain) = (floats(&[2, 3]), floats(&[2, 2]), floats(&[2]));
    let mask = now.gt(0).expect("bools");
    let ok = Rollout {
        old: None,
        reference: None,
        advantages: &gain,
        mask: &mask,
    };
    let plain = Grpo::default();
    assert!(grpo(&now, &ok, &plain).is_ok());
    let old = Some(&short);
    refused(grpo(&now, &Rollout { old, ..ok }, &plain), "old", "[2, 3]");
    let reference = Some(&short);
    refused(
        grpo(&now, &Rollout { reference, ..ok }, &plain),
        "reference",
        "[2, 3]",
    );
    let advantages = &floats(&[3]);
    refused(
        grpo(&now, &Rollout { advantages, ..ok }, &plain),
        "advantages",
        "[2]",
    );
    let mask = &now;
    refused(grpo(&now, &Rollout { mask, ..ok }, &plain), "mask", "bools");
    refused(grpo(&gain, &ok, &plain), "log_probs", "f32[2]");
    refused(
        grpo(&now, &ok, &Grpo { kl: 0.1, ..plain }),
        "reference",
        "needs",
    );
    refused(grpo(&now, &ok, &Grpo { kl: -0.1, ..plain }), "kl", "-0.1");
    let clip = (1.5, 0.2);
    refused(grpo(&now, &ok, &Grpo { clip, ..plain }), "clip", "1.5");
}
