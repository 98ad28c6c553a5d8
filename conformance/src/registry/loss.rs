//! Losses.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, entry, one,
    sample::{floats, index, small},
};
use anymesh_core::{
    DType, Result, Tensor,
    ops::{CrossEntropyOptions, GaussianNll, LossReduction, PoissonNll, TripletMargin},
};
use serde_json::{Value, json};

const REDUCTIONS: &[(&str, LossReduction)] = &[
    ("none", LossReduction::None),
    ("mean", LossReduction::Mean),
    ("sum", LossReduction::Sum),
];
const REDUCTION: Attr = attr(
    "reduction",
    AttrKind::Choice(&["none", "mean", "sum"]),
    "\"mean\"",
    "what becomes of the losses of all positions",
);
const MARGIN: Attr = attr("margin", AttrKind::Float, "1", "the distance to keep");
const NO_MARGIN: Attr = attr("margin", AttrKind::Float, "0", "the distance to keep");
const BETA: Attr = attr(
    "beta",
    AttrKind::Float,
    "1",
    "where the square becomes a line",
);
const DELTA: Attr = attr(
    "delta",
    AttrKind::Float,
    "1",
    "where the square becomes a line",
);
const LOG_TARGET: Attr = attr(
    "log_target",
    AttrKind::Bool,
    "false",
    "whether targets are logarithms",
);
const LOG_INPUT: Attr = attr(
    "log_input",
    AttrKind::Bool,
    "true",
    "whether rates are logarithms",
);
const ORDER: Attr = attr("p", AttrKind::Float, "2", "the order of the norm");
const FULL: Attr = attr(
    "full",
    AttrKind::Bool,
    "false",
    "whether terms that only depend on the target count",
);
const EPS: Attr = attr("eps", AttrKind::Float, "1e-6", "the least variance");
const EPS_RATE: Attr = attr(
    "eps",
    AttrKind::Float,
    "1e-8",
    "what keeps the logarithm of a rate finite",
);
const IGNORE: Attr = Attr {
    nullable: true,
    ..attr(
        "ignore_index",
        AttrKind::Int,
        "-100",
        "the class of positions without a loss; null for none",
    )
};
const SMOOTHING: Attr = attr(
    "label_smoothing",
    AttrKind::Float,
    "0",
    "the share of the target that is spread over all classes",
);

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "mse_loss",
        "x, target",
        &[REDUCTION],
        |c| one(c.x(0)?.mse_loss(c.x(1)?, reduction(c)?)),
        whole,
    ),
    entry(
        "l1_loss",
        "x, target",
        &[REDUCTION],
        |c| one(c.x(0)?.l1_loss(c.x(1)?, reduction(c)?)),
        whole,
    ),
    entry(
        "smooth_l1_loss",
        "x, target",
        &[BETA, REDUCTION],
        |c| {
            one(c
                .x(0)?
                .smooth_l1_loss(c.x(1)?, c.attrs.float("beta")?, reduction(c)?))
        },
        whole,
    ),
    entry(
        "huber_loss",
        "x, target",
        &[DELTA, REDUCTION],
        |c| {
            one(c
                .x(0)?
                .huber_loss(c.x(1)?, c.attrs.float("delta")?, reduction(c)?))
        },
        whole,
    ),
    entry(
        "hinge_loss",
        "x, target",
        &[MARGIN, REDUCTION],
        |c| {
            one(c
                .x(0)?
                .hinge_loss(c.x(1)?, c.attrs.float("margin")?, reduction(c)?))
        },
        whole,
    ),
    entry(
        "hinge_embedding_loss",
        "x, target",
        &[MARGIN, REDUCTION],
        hinge_embedding,
        whole,
    ),
    entry(
        "margin_ranking_loss",
        "x, y, target",
        &[NO_MARGIN, REDUCTION],
        margin_ranking,
        whole,
    ),
    entry(
        "bce_loss",
        "x, target",
        &[REDUCTION],
        |c| one(c.x(0)?.bce_loss(c.x(1)?, reduction(c)?)),
        logarithmic,
    ),
    entry(
        "bce_with_logits_loss",
        "x, target, pos_weight?",
        &[REDUCTION],
        |c| {
            one(c
                .x(0)?
                .bce_with_logits_loss(c.x(1)?, c.maybe(2), reduction(c)?))
        },
        with_logits,
    ),
    entry(
        "kl_div_loss",
        "x, target",
        &[LOG_TARGET, REDUCTION],
        |c| {
            one(c
                .x(0)?
                .kl_div_loss(c.x(1)?, c.attrs.bool("log_target")?, reduction(c)?))
        },
        logarithmic,
    ),
    entry(
        "gaussian_nll_loss",
        "x, target, var",
        &[FULL, EPS, REDUCTION],
        gaussian,
        gaussians,
    ),
    entry(
        "poisson_nll_loss",
        "x, target",
        &[LOG_INPUT, FULL, EPS_RATE, REDUCTION],
        poisson,
        logarithmic,
    ),
    entry(
        "cosine_embedding_loss",
        "x, y, target",
        &[NO_MARGIN, REDUCTION],
        cosine,
        cosines,
    ),
    entry(
        "triplet_margin_loss",
        "x, positive, negative",
        &[MARGIN, ORDER, REDUCTION],
        triplet,
        triplets,
    ),
    entry(
        "cross_entropy",
        "x, target, weight?",
        &[IGNORE, SMOOTHING, REDUCTION],
        cross_entropy,
        classes,
    ),
    entry(
        "nll_loss",
        "x, target, weight?",
        &[IGNORE, REDUCTION],
        nll,
        classes,
    ),
];

fn reduction(c: &Call<'_>) -> Result<LossReduction> {
    c.attrs.choice("reduction", REDUCTIONS)
}

fn hinge_embedding(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c
        .x(0)?
        .hinge_embedding_loss(c.x(1)?, c.attrs.float("margin")?, reduction(c)?))
}

fn margin_ranking(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c
        .x(0)?
        .margin_ranking_loss(c.x(1)?, c.x(2)?, c.attrs.float("margin")?, reduction(c)?))
}

fn gaussian(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.gaussian_nll_loss(
        c.x(1)?,
        c.x(2)?,
        &GaussianNll {
            full: c.attrs.bool("full")?,
            eps: c.attrs.float("eps")?,
            reduction: reduction(c)?,
        },
    ))
}

fn poisson(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.poisson_nll_loss(
        c.x(1)?,
        &PoissonNll {
            log_input: c.attrs.bool("log_input")?,
            full: c.attrs.bool("full")?,
            eps: c.attrs.float("eps")?,
            reduction: reduction(c)?,
        },
    ))
}

fn cosine(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c
        .x(0)?
        .cosine_embedding_loss(c.x(1)?, c.x(2)?, c.attrs.float("margin")?, reduction(c)?))
}

fn triplet(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.triplet_margin_loss(
        c.x(1)?,
        c.x(2)?,
        &TripletMargin {
            margin: c.attrs.float("margin")?,
            p: c.attrs.float("p")?,
            reduction: reduction(c)?,
        },
    ))
}

fn cross_entropy(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let options = CrossEntropyOptions {
        weight: c.maybe(2).cloned(),
        ignore_index: c.attrs.opt_int("ignore_index")?,
        label_smoothing: c.attrs.float("label_smoothing")?,
        reduction: reduction(c)?,
    };
    one(c.x(0)?.cross_entropy(c.x(1)?, &options))
}

fn nll(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.nll_loss(
        c.x(1)?,
        c.maybe(2),
        c.attrs.opt_int("ignore_index")?,
        reduction(c)?,
    ))
}

/// Shapes and reductions that every loss is called with. The mean is over a power of two.
const SHAPES: [(&[usize], &str); 4] = [
    (&[5, 7], "sum"),
    (&[4, 2, 3], "none"),
    (&[8, 4], "mean"),
    (&[2], "sum"),
];

fn with(op: &str, reduction: &str) -> Value {
    // The last parameter away from its default where nothing is reduced.
    let name = match op {
        "smooth_l1_loss" => "beta",
        "huber_loss" => "delta",
        "hinge_loss" | "hinge_embedding_loss" | "margin_ranking_loss" => "margin",
        _ => return json!({"reduction": reduction}),
    };
    json!({"reduction": reduction, name: if reduction == "none" { 2 } else { 1 }})
}

/// Losses of small integers, whose sums are exact.
fn whole(op: &'static str) -> Vec<Sample> {
    let signs = Fill::Pick(&[1, -1]);
    let call = |(shape, reduction): (&[usize], &str)| {
        let target = if matches!(op, "hinge_loss" | "hinge_embedding_loss") {
            floats(shape, signs)
        } else {
            small(shape)
        };
        let inputs = if op == "margin_ranking_loss" {
            vec![small(shape), small(shape), floats(shape, signs)]
        } else {
            vec![small(shape), target]
        };
        Sample::new(inputs, with(op, reduction))
    };
    SHAPES.map(call).into()
}

/// Losses of probabilities and rates: each position is exact on its own.
fn logarithmic(op: &'static str) -> Vec<Sample> {
    let call = |(shape, reduction): (&[usize], &str)| {
        let plain = reduction == "none";
        let attrs = match op {
            "kl_div_loss" => json!({"log_target": plain, "reduction": reduction}),
            "poisson_nll_loss" => {
                json!({"log_input": plain, "full": !plain, "eps": 0.125, "reduction": reduction})
            }
            _ => json!({"reduction": reduction}),
        };
        let target = if op == "poisson_nll_loss" {
            Fill::Int { lo: 0, hi: 5 }
        } else {
            Fill::Unit
        };
        Sample::new([floats(shape, Fill::Unit), floats(shape, target)], attrs).exact(plain)
    };
    SHAPES.map(call).into()
}

fn with_logits(_: &'static str) -> Vec<Sample> {
    let weights: [Option<&[usize]>; 4] = [Some(&[7]), None, Some(&[8, 1]), Some(&[])];
    let call = |((shape, reduction), weight): ((&[usize], &str), Option<&[usize]>)| {
        let weight = weight.map(|shape| floats(shape, Fill::Int { lo: 1, hi: 3 }));
        let inputs = [small(shape), floats(shape, Fill::Unit)]
            .into_iter()
            .chain(weight);
        Sample::new(inputs, json!({"reduction": reduction})).exact(reduction == "none")
    };
    SHAPES.into_iter().zip(weights).map(call).collect()
}

fn gaussians(_: &'static str) -> Vec<Sample> {
    let variances: [&[usize]; 4] = [&[7], &[4, 2, 3], &[8, 1], &[2]];
    let call = |((shape, reduction), variance): ((&[usize], &str), &[usize])| {
        let inputs = [
            small(shape),
            small(shape),
            floats(variance, Fill::Int { lo: 1, hi: 4 }),
        ];
        Sample::new(
            inputs,
            json!({"full": reduction == "sum", "eps": 0.5, "reduction": reduction}),
        )
        .exact(reduction == "none")
    };
    SHAPES.into_iter().zip(variances).map(call).collect()
}

fn cosines(_: &'static str) -> Vec<Sample> {
    let call = |shape: &[usize], attrs| {
        let targets = floats(&shape[..shape.len() - 1], Fill::Pick(&[1, -1]));
        Sample::new([small(shape), small(shape), targets], attrs).exact(false)
    };
    vec![
        call(&[5, 7], json!({"reduction": "sum"})),
        call(&[4, 2, 3], json!({"margin": 0.25, "reduction": "none"})),
        call(&[8, 4], json!({})),
    ]
}

fn triplets(_: &'static str) -> Vec<Sample> {
    let call = |shape: &[usize], attrs| {
        Sample::new([small(shape), small(shape), small(shape)], attrs).exact(false)
    };
    vec![
        call(&[5, 7], json!({"reduction": "sum"})),
        call(
            &[4, 2, 3],
            json!({"margin": 2, "p": 1, "reduction": "none"}),
        ),
        call(&[8, 4], json!({"p": 3})),
    ]
}

fn classes(op: &'static str) -> Vec<Sample> {
    let weights = |n| floats(&[n], Fill::Int { lo: 1, hi: 3 });
    // Sums of log-probabilities that are whole are exact, log-sum-exps are not.
    let exact = op == "nll_loss";
    let mut all = vec![
        Sample::new(
            [small(&[5, 7]), index(&[5], 7)],
            json!({"reduction": "sum"}),
        )
        .exact(exact),
        Sample::new(
            [small(&[4, 8]), index(&[4], 8), weights(8)],
            json!({"reduction": "none"}),
        )
        .exact(exact),
        Sample::new(
            [small(&[2, 3, 4]), index(&[2, 4], 3)],
            json!({"ignore_index": 1}),
        )
        .exact(false),
        Sample::new(
            [
                small(&[8, 3]),
                Input::new(DType::I64, &[8], Fill::Index(3)),
                weights(3),
            ],
            json!({"ignore_index": null}),
        )
        .exact(false),
    ];
    if op == "cross_entropy" {
        all.push(
            Sample::new(
                [small(&[4, 5]), index(&[4], 5), weights(5)],
                json!({"label_smoothing": 0.25, "reduction": "sum"}),
            )
            .exact(false),
        );
        all.push(
            Sample::new([small(&[3, 4]), floats(&[3, 4], Fill::Unit)], json!({})).exact(false),
        );
        all.push(
            Sample::new(
                [small(&[4, 3, 2]), index(&[4, 2], 3)],
                json!({"label_smoothing": 0.25, "ignore_index": 2}),
            )
            .exact(false),
        );
        let soft = [
            small(&[2, 4, 3]),
            floats(&[2, 4, 3], Fill::Unit),
            weights(4),
        ];
        all.push(
            Sample::new(soft, json!({"label_smoothing": 0.125, "reduction": "none"})).exact(false),
        );
        all.push(Sample::new([small(&[5]), index(&[], 5)], json!({})).exact(false));
    }
    all
}
