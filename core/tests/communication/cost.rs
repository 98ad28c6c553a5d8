//! Cost models: as text, and what they promise of prices.

use anymesh_core::{
    DType, Device, Mesh, Reduction, Shape, Sharding, Tensor, TensorType,
    cost::{CostModel, Curve, LINKS, PRESETS, estimate},
    meta,
    ops::AttentionOptions,
    reshard::{Objective, plan},
    spmd::Ledger,
};
use std::sync::{Arc, Mutex};

fn presets() -> Vec<CostModel> {
    let named = |name: &str| CostModel::preset(name).expect("a preset");
    let mut all = vec![CostModel::default()];
    for (name, _) in PRESETS {
        all.push(named(name));
        all.extend(LINKS.map(|(link, _)| named(&format!("{name}/{link}"))));
    }
    all
}

/// Everything small, then every power of two with its neighbours, far beyond any tensor.
fn sizes() -> Vec<u64> {
    let large = (12..50).flat_map(|e| {
        let power = 1u64 << e;
        [power - 1, power, power + 1, power + power / 2]
    });
    (0..4096).chain(large).collect()
}

#[test]
fn a_model_reads_back_as_it_was_written() {
    for cost in presets() {
        let text = cost.to_text();
        assert_eq!(CostModel::parse(&text).expect(&text), cost, "{text}");
    }
    let mut cost = CostModel::preset("h100/hdr").expect("a preset");
    assert_eq!(cost.link.bandwidth, 25e9);
    cost.axes.insert("pp".into(), cost.link);
    cost.memory = Some(123_456_789_012_345_678);
    assert_eq!(CostModel::parse(&cost.to_text()), Ok(cost));
}

#[test]
fn a_mistake_is_named_by_its_line_and_key() {
    for (text, expected) in [
        (
            "name = h100",
            "'line 1: name = h100' as a cost model: expected a name in double quotes",
        ),
        (
            "\n# a # b\nspeed = 1 # fast",
            "'line 3: speed = 1' as a cost model: expected one of name, start, overlap, reshard_memory before the first section",
        ),
        (
            "[device]\nmemory = 1.5",
            "'line 2: memory = 1.5' as a cost model: expected a whole number",
        ),
        (
            "[device]\nflops = 1",
            "expected one of memory, bandwidth, launch in [device]",
        ),
        (
            "[node]\nranks = 0",
            "'line 2: ranks = 0' as a cost model: expected at least one rank",
        ),
        ("[link]\nbandwidth = 0", "expected a number above 0"),
        (
            "[link]\nlatency = -1",
            "expected seconds, finite and not negative",
        ),
        ("[link]\nlatency = nan", "expected a number"),
        ("[link]\nkind = \"nvlink9\"", "one of nvlink3, nvlink4"),
        (
            "[link]\n[link]",
            "'line 2: [link]' as a cost model: expected each once, this is in line 1 already",
        ),
        (
            "start = 1\nstart = 2",
            "'line 2: start = 2' as a cost model: expected each once, this is in line 1 already",
        ),
        ("[rates]\nf17 = 1", "expected cannot read 'f17' as a dtype"),
        ("[axis.a b]", "expected [link], [node], [axis.NAME]"),
        ("[wires]", "expected [link], [node], [axis.NAME]"),
        (
            "overlap = 3",
            "expected 1 (for nothing) to 2 (nothing gained)",
        ),
        (
            "[efficiency]\nproducts = [1, 2]",
            "expected pairs of amount and fraction",
        ),
        (
            "[efficiency]\nproducts = [[1, 0.1], [2, 0.9]]",
            "more never takes less time",
        ),
        (
            "[efficiency]\ntouches = [[1, 1.5]]",
            "fractions above 0 and at most 1",
        ),
        (
            "fast",
            "'line 1: fast' as a cost model: expected `key = value`",
        ),
    ] {
        let error = CostModel::parse(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}\n{error}\n{expected}");
    }
    let error = CostModel::named("h1000")
        .expect_err("no preset")
        .to_string();
    assert!(error.contains("a100-40, a100-80, h100"), "{error}");
    let error = CostModel::named("none.toml")
        .expect_err("no file")
        .to_string();
    assert!(
        error.starts_with("cannot read 'none.toml' as a cost model"),
        "{error}"
    );
}

#[test]
fn more_bytes_never_cost_less() {
    for cost in presets() {
        let link = |bytes| cost.transfer_seconds(cost.link, bytes);
        let touch = |bytes: u64| cost.kernel_seconds(DType::BF16, 0.0, bytes as f64);
        let product = |flops: u64| cost.kernel_seconds(DType::BF16, flops as f64, 0.0);
        for pair in sizes().windows(2) {
            for price in [&link as &dyn Fn(u64) -> f64, &touch, &product] {
                let (less, more) = (price(pair[0]), price(pair[1]));
                assert!(more >= less, "{}: {pair:?}: {less} {more}", cost.name);
            }
        }
    }
}

#[test]
fn a_curve_goes_through_its_points_and_never_falls() {
    let curve = Curve::new([(1e3, 0.01), (1e6, 0.5), (1e8, 0.8)]).expect("a curve");
    for (amount, fraction) in curve.points() {
        assert_eq!(curve.at_best(*amount), amount / fraction);
    }
    let times: Vec<f64> = (0..1000).map(|i| curve.at_best(1.03f64.powi(i))).collect();
    assert!(times.windows(2).all(|pair| pair[0] < pair[1]));
}

#[test]
fn plans_grow_with_bytes_and_a_reduce_scatter_is_never_dearer_than_an_all_reduce() {
    let (whole, cut) = (Sharding::replicated(), Sharding::replicated().cut(0, 0));
    let partial = Sharding::replicated().partial_over(0, Reduction::Sum);
    for cost in presets() {
        for ranks in [2, 3, 8, 16] {
            let mesh = Mesh::new(&format!("a={ranks}"), &meta()).expect("a mesh");
            let mesh = mesh.with_cost(cost.clone());
            let seconds = |elements: u64, from: &Sharding, to: &Sharding| {
                let shape = Shape::from([elements as usize]);
                let plan = plan(&mesh, &shape, DType::BF16, from, to, Objective::Bytes);
                plan.expect("a plan").seconds
            };
            let mut before = [0.0; 4];
            for elements in (1..40).chain((6..40).step_by(3).map(|e| 1 << e)) {
                let scattered = seconds(elements, &partial, &cut);
                let reduced = seconds(elements, &partial, &whole);
                assert!(
                    scattered <= reduced,
                    "{}, {ranks} ranks, {elements} elements: {scattered} {reduced}",
                    cost.name
                );
                // Parts of odd sizes weigh as much as the largest: compare like with like.
                if elements as usize % ranks == 0 {
                    let now = [
                        scattered,
                        reduced,
                        seconds(elements, &cut, &whole),
                        seconds(elements, &whole, &cut),
                    ];
                    assert!(
                        now.iter().zip(before).all(|(n, b)| *n >= b),
                        "{now:?} {before:?}"
                    );
                    before = now;
                }
            }
        }
    }
}

#[test]
fn axes_know_whether_they_leave_the_node() {
    let cost = CostModel::preset("h100").expect("a preset");
    let mesh = Mesh::new("pp=2, dp=4, fsdp=2, tp=4", &meta()).expect("a mesh");
    let bandwidths = |mesh: &Mesh| -> Vec<(f64, f64)> {
        let axes = 0..mesh.axes().len();
        axes.map(|a| (cost.link(mesh, a).bandwidth, cost.ring(mesh, a).bandwidth))
            .collect()
    };
    // tp and fsdp fill a node of eight. Each rank of dp has its own wire out of the node.
    let (near, far) = (450e9, 50e9);
    let expected = [(far, far), (far, far), (near, near), (near, near)];
    assert_eq!(bandwidths(&mesh), expected);
    let sub = mesh
        .at("tp", 1)
        .expect("a mesh")
        .at("fsdp", 0)
        .expect("a mesh");
    assert_eq!(bandwidths(&sub), [(far, far), (far, far)]);
    // Two ranks of a group share a node: twice the wires leave it. Eight: as much as the node has.
    let two = Mesh::new("dp=8, tp=4", &meta()).expect("a mesh");
    assert_eq!(bandwidths(&two)[0], (far, 2.0 * far));
    let all = Mesh::new("dp=64", &meta()).expect("a mesh");
    assert_eq!(bandwidths(&all)[0], (far, 8.0 * far));
    // Groups of three do not fit into nodes of eight.
    let odd = Mesh::new("tp=3", &meta()).expect("a mesh");
    assert_eq!(bandwidths(&odd)[0].0, far);
}

#[test]
fn a_step_takes_what_its_plan_says_and_the_ledger_knows_along_which_axes() {
    let mesh = Mesh::new("dp=2, tp=4", &meta()).expect("a mesh");
    let mesh = mesh.with_cost(CostModel::preset("a100-80").expect("a preset"));
    for (from, to) in [
        ("f32[64@dp, 96]{sum:tp}", "f32[64@dp, 96@tp]"),
        ("f32[64@dp, 96]{sum:tp}", "f32[64, 96]"),
        ("f32[64@dp, 96@tp]", "f32[64@tp, 96@dp]"),
        ("f32[65@dp@tp, 96]", "f32[65, 96@tp]"),
    ] {
        let ty = |text| TensorType::parse(text, &mesh).expect("a type");
        let (from, to) = (ty(from), ty(to));
        let x = Tensor::zeros(
            from.shape.clone(),
            from.dtype,
            (&mesh, from.sharding.clone()),
        );
        let x = x.expect("a tensor");
        let (y, ledger) = Ledger::record(|| x.reshard(to.sharding.clone()));
        y.expect("a reshard");
        let plan = plan(
            &mesh,
            x.shape(),
            x.dtype(),
            &from.sharding,
            &to.sharding,
            Objective::Time,
        );
        let plan = plan.expect("a plan");
        let sent = plan.steps.iter().filter(|step| step.recv_bytes > 0);
        let expected: Vec<_> = sent
            .map(|step| {
                let name = |a: &usize| mesh.axes()[*a].0.clone();
                let axes: Vec<String> = step.axes.iter().map(name).collect();
                (step.kind.name(), step.recv_bytes, step.seconds, axes)
            })
            .collect();
        let done: Vec<_> = (ledger.entries.into_iter())
            .map(|e| (e.kind, e.bytes, e.modelled, e.axes))
            .collect();
        assert_eq!(done, expected, "{plan}");
    }
}

/// Two products of one layer, cut as Megatron cuts them, with their gradients.
fn two_products(mesh: &Mesh) -> anymesh_core::Result<Tensor> {
    let zeros = |dims: [usize; 2], sharding| Tensor::zeros(dims, DType::BF16, (mesh, sharding));
    let x = zeros([512, 256], "[@dp, _]")?;
    let up = zeros([256, 1024], "[_, @tp]")?.require_grad()?;
    let down = zeros([1024, 256], "[@tp, _]")?.require_grad()?;
    let y = x.matmul(&up)?.matmul(&down)?.reshard("[@dp, _]")?;
    let grads = y.backward_with(&zeros([512, 256], "[@dp, _]")?)?;
    grads.of(&up)?;
    grads.of(&down)
}

#[test]
fn an_estimate_counts_the_products_and_the_memory_of_one_rank() {
    for (axes, dp, tp) in [
        ("dp=1, tp=1", 1, 1),
        ("dp=2, tp=4", 2, 4),
        ("dp=4, tp=8", 4, 8),
    ] {
        let mesh = Mesh::new(axes, &meta()).expect("a mesh");
        let cost = CostModel::preset("h100").expect("a preset");
        let estimate = estimate(&mesh.with_cost(cost.clone()), two_products).expect("an estimate");
        // Forward two products, backward three: the input needs no gradient.
        let product = 2.0 * 512.0 * 256.0 * 1024.0 / (dp * tp) as f64;
        assert_eq!(estimate.total.products, 5.0 * product, "{axes}\n{estimate}");
        let operands = (512 * 256 / dp + 2 * 256 * 1024 / tp) as u64 * 2;
        assert!(
            estimate.memory > operands && estimate.memory < 16 * operands,
            "{estimate}"
        );
        let sum: f64 = estimate.ledger.entries.iter().map(|e| e.modelled).sum();
        assert_eq!(
            estimate.total.communication > 0.0,
            dp * tp > 1,
            "{estimate}"
        );
        assert!(
            (estimate.total.communication - sum).abs() <= 1e-12,
            "{estimate}"
        );
        let exposed = estimate.exposed(|_| true);
        assert!(
            exposed >= 0.0 && exposed <= estimate.total.communication,
            "{estimate}"
        );
        let all = estimate.exposed(|_| false);
        assert!(
            (all - estimate.total.communication).abs() <= 1e-12,
            "{estimate}"
        );
        assert_eq!(estimate.to_json()["total"]["products"], 5.0 * product);
        let launches = estimate.total.kernels as f64 * cost.device.launch;
        assert!(estimate.total.compute >= launches + 5.0 * product / cost.rate(DType::BF16));
    }
}

#[test]
fn work_follows_from_shapes() {
    let work = |f: &dyn Fn(&Device) -> anymesh_core::Result<Tensor>, op: &str| {
        let seen = Arc::new(Mutex::new(vec![]));
        let (log, name) = (seen.clone(), op.to_string());
        let device = meta().decorated(move |backend, kernel| {
            if kernel.op() == name {
                log.lock().expect("a log").push(kernel.work());
            }
            backend.launch(kernel)
        });
        f(&device).expect("an op");
        let seen = seen.lock().expect("a log");
        seen[seen.len() - 1]
    };
    let zeros = |device: &Device, dims: &[usize]| Tensor::zeros(dims.to_vec(), DType::BF16, device);
    // 2 batches, 8 heads, 64 queries and 64 keys of 16: half of the pairs and the diagonal.
    let seen = work(
        &|d| {
            let (q, k) = (zeros(d, &[2, 8, 64, 16])?, zeros(d, &[2, 2, 64, 16])?);
            Ok(q.attention(&k, &k, &AttentionOptions::causal())?.out)
        },
        "attention",
    );
    assert_eq!(
        seen.products,
        2.0 * (2.0 * 8.0) * (64.0 * 65.0 / 2.0) * 32.0
    );
    // q, k, v and the result in 2 bytes, the log-sum-exp in 4.
    let elements = (2 * 8 * 64 * 16 * 2 + 2 * (2 * 2 * 64 * 16)) as f64;
    assert_eq!(seen.bytes, elements * 2.0 + (2 * 8 * 64 * 4) as f64);
    let seen = work(&|d| zeros(d, &[4, 1])?.add(&zeros(d, &[4, 100])?), "add");
    assert_eq!(
        (seen.products, seen.bytes),
        (0.0, (4.0 + 400.0 + 400.0) * 2.0)
    );
    // Three rows out of a large table.
    let seen = work(
        &|d| zeros(d, &[1000, 10])?.embedding(&Tensor::zeros([3], DType::I32, d)?),
        "embedding",
    );
    assert_eq!(seen.bytes, 2.0 * 30.0 * 2.0 + 3.0 * 4.0);
}
