//! What a user can get wrong, one test for each kind of mistake: the exact error, and a message
//! that names the op.

use crate::support::device;
use anymesh_core::{
    DType, Device, Error, Mesh, NoGradient, Result, Shape, Sharding, Tensor, TensorType,
    backend::ScatterOp,
    grad::{GradOptions, grad},
    ops::{
        AttentionOptions, Conv, CrossEntropyOptions, LossReduction, NormOptions, Order, PadMode,
        Rng, RopeOptions, RopeStyle, Side, TripletMargin,
    },
    spmd::{Policy, with_policy},
};

/// A second device that is not the first, though it runs the same backend.
fn other_device() -> Device {
    Device::new(anymesh_backend_cpu::CpuBackend::new())
}

fn floats(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &device()).expect("small")
}

fn ints(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::I32, &device()).expect("small")
}

fn bools(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::Bool, &device()).expect("small")
}

/// Whether an error says in fields what it is about.
fn has_fields(error: &Error) -> bool {
    match error {
        Error::Shape { operands, .. } => !operands.is_empty(),
        Error::Argument { argument, .. } => !argument.is_empty(),
        _ => true,
    }
}

/// The types that an error says it is about.
fn types_of<T>(result: Result<T>) -> Vec<String> {
    match result.map(|_| ()) {
        Err(
            Error::Shape { operands, .. }
            | Error::Argument { operands, .. }
            | Error::Gradient { operands, .. },
        ) => operands.iter().map(|t| t.to_string()).collect(),
        other => panic!("{other:?}"),
    }
}

/// The argument that an error blames.
fn argument_of<T>(result: Result<T>) -> &'static str {
    match result.map(|_| ()) {
        Err(Error::Argument { argument, .. }) => argument,
        other => panic!("{other:?}"),
    }
}

/// Checks that a result is the given variant of `Error` from the given op, and that the message
/// names the op.
macro_rules! refused {
    ($($variant:ident $op:literal: $result:expr;)*) => {$(
        match $result.map(|_| ()) {
            Err(error) => {
                assert!(matches!(&error, Error::$variant { op, .. } if *op == $op), "{}: {error:?}", stringify!($result));
                assert!(error.to_string().contains($op), "{error}");
                assert!(has_fields(&error), "{error:?}");
            }
            Ok(()) => panic!("{} was accepted", stringify!($result)),
        }
    )*};
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let (x, y) = (floats(&[2, 3]), floats(&[2, 4]));
    let index = ints(&[2]);
    let mean = LossReduction::Mean;
    refused! {
        Shape "add": x.add(&y);
        Shape "eq": x.eq(&y);
        Shape "where_": bools(&[2, 5]).where_(&x, &x);
        Shape "masked_fill": x.masked_fill(&bools(&[4]), 0.0);
        Shape "masked_select": x.masked_select(&bools(&[4]));
        Shape "matmul": x.matmul(&y);
        Shape "bmm": floats(&[2, 3, 4]).bmm(&floats(&[3, 4, 5]));
        Shape "dot": floats(&[3]).dot(&floats(&[3, 1]));
        Shape "linear": x.linear(&y, None);
        Shape "grouped_matmul": x.grouped_matmul(&y, &index);
        Shape "grouped_matmul": x.grouped_matmul(&floats(&[2, 4, 5]), &index);
        Shape "grouped_matmul": x.grouped_matmul(&floats(&[3, 3, 5]), &index);
        Shape "grouped_outer": x.grouped_outer(&floats(&[3, 3]), &index);
        Shape "grouped_outer": x.grouped_outer(&y, &ints(&[2, 1]));
        Shape "concat": Tensor::concat(&[&x, &y], 0);
        Shape "stack": Tensor::stack(&[&x, &y], 0);
        Shape "reshape": x.reshape([4, 2]);
        Shape "expand": x.expand([2, 6]);
        Shape "gather": x.gather(1, &ints(&[3, 1]));
        Shape "index_select": x.index_select(0, &ints(&[2, 2]));
        Shape "scatter": x.scatter(1, &ints(&[2, 2]), &floats(&[1, 1]), ScatterOp::Add);
        Shape "index_put": x.index_put(&[&index], &floats(&[5]), ScatterOp::Set);
        Shape "index_add": x.index_add(0, &index, &floats(&[3, 3]));
        Shape "searchsorted": x.searchsorted(&floats(&[3, 2]), Side::Left);
        Shape "layer_norm": x.layer_norm(&NormOptions::new().weight(&floats(&[2])));
        Shape "group_norm": floats(&[2, 4]).group_norm(2, &NormOptions::new().weight(&floats(&[2])));
        Shape "batch_norm": x.batch_norm(&floats(&[2]), &floats(&[3]), &NormOptions::new());
        Shape "attention": floats(&[1, 2, 3, 4]).attention(&floats(&[1, 2, 3, 5]), &floats(&[1, 2, 3, 4]), &AttentionOptions::default());
        Shape "attention": floats(&[1, 2, 3, 4]).attention(&floats(&[1, 2, 5, 4]), &floats(&[1, 2, 5, 4]), &within(&ints(&[1, 3]), &ints(&[1, 3])));
        Shape "cross_entropy": x.cross_entropy(&ints(&[3]), &CrossEntropyOptions::default());
        Shape "mse_loss": x.mse_loss(&floats(&[3]), mean);
        Shape "cosine_embedding_loss": x.cosine_embedding_loss(&x, &floats(&[3]), 0.0, mean);
        Shape "cosine_similarity": x.cosine_similarity(&y, 1, 1e-8);
        Shape "rope": x.rope(&floats(&[2, 2]), &floats(&[2, 2]), RopeStyle::Half);
        Shape "swiglu": x.swiglu();
        Shape "swiglu2": x.swiglu2(&y);
        Shape "dropout_add": x.dropout_add(&y, 0.5, Rng::new(1));
        Shape "conv2d": floats(&[1, 3, 5, 5]).conv2d(&floats(&[4, 2, 3, 3]), None, &Conv::default());
        Shape "from_bytes": Tensor::from_slice(&[1f32, 2.0], [3], &device());
        Shape "item": x.item();
    }
}

#[test]
fn scalars_are_refused_where_an_axis_is_needed() {
    let x = floats(&[]);
    let index = ints(&[]);
    refused! {
        Axis "softmax": x.softmax(0);
        Axis "log_softmax": x.log_softmax(-1);
        Axis "sum": x.sum(&[0], false);
        Axis "argmax": x.argmax(Some(0), false);
        Axis "cumsum": x.cumsum(0);
        Axis "sort": x.sort(0, Order::Ascending);
        Axis "topk": x.topk(1, 0, Order::Descending);
        Axis "normalize": x.normalize(2.0, 0, 1e-12);
        Axis "concat": Tensor::concat(&[&x, &x], 0);
        Axis "gather": x.gather(0, &index);
        Axis "index_select": x.index_select(0, &index);
        Axis "narrow": x.narrow(0, 0, 1);
        Axis "flip": x.flip(&[0]);
        Axis "unbind": x.unbind(0);
        Shape "matmul": x.matmul(&floats(&[2]));
        Shape "searchsorted": x.searchsorted(&x, Side::Left);
        Shape "embedding": x.embedding(&index);
        Shape "tril": x.tril(0);
        Shape "diag": x.diag(0);
        Shape "group_norm": x.group_norm(1, &NormOptions::new());
        Shape "batch_norm_train": x.batch_norm_train(&NormOptions::new());
        Shape "cross_entropy": x.cross_entropy(&index, &CrossEntropyOptions::default());
        Shape "rope": x.rope(&x, &x, RopeStyle::Half);
        Shape "glu": x.glu();
        Shape "multinomial": x.multinomial(1, true, Rng::new(1));
        Argument "layer_norm": x.layer_norm(&NormOptions::new());
        Argument "rms_norm": x.rms_norm(&NormOptions::new());
    }
}

#[test]
fn tensors_without_elements_go_through_every_kind_of_op() {
    let mean = LossReduction::Mean;
    let check = |x: Result<Tensor>, dims: &[usize]| {
        let x = x.expect("empty tensors are ordinary");
        assert_eq!(x.dims(), dims);
        assert_eq!(
            x.to_bytes().expect("readable").len(),
            x.numel() * x.dtype().size()
        );
    };
    for shape in [[0, 4], [4, 0]] {
        let x = floats(&shape);
        let (rows, columns) = (shape[0], shape[1]);
        check(x.add(&x), &shape);
        check(x.add(1.0), &shape);
        check(x.exp(), &shape);
        check(x.eq(&x), &shape);
        check(bools(&shape).where_(&x, &x), &shape);
        check(x.cast(DType::F16), &shape);
        check(x.contiguous(), &shape);
        check(x.t(), &[columns, rows]);
        check(x.reshape([0]), &[0]);
        check(x.flip(&[0, 1]), &shape);
        check(Tensor::concat(&[&x, &x], 0), &[2 * rows, columns]);
        check(Tensor::stack(&[&x, &x], 0), &[2, rows, columns]);
        check(
            x.pad(&[(1, 0), (0, 0)], PadMode::Constant(7.into())),
            &[rows + 1, columns],
        );
        check(x.roll(&[1], &[0]), &shape);
        check(x.tile(&[2, 2]), &[2 * rows, 2 * columns]);
        check(x.tril(0), &shape);
        check(x.sum(&[0], false), &[columns]);
        check(x.prod(&[], false), &[]);
        check(x.logsumexp(&[1], true), &[rows, 1]);
        check(x.any(&[], false), &[]);
        check(x.cumsum(1), &shape);
        check(x.sort(1, Order::Ascending).map(|s| s.0), &shape);
        check(x.argsort(0, Order::Descending), &shape);
        check(x.topk(0, 0, Order::Descending).map(|t| t.0), &[0, columns]);
        check(x.searchsorted(&x, Side::Left), &shape);
        check(x.matmul(&x.t().expect("a matrix")), &[rows, rows]);
        check(x.linear(&floats(&[3, columns]), None), &[rows, 3]);
        check(x.index_select(0, &ints(&[0])), &[0, columns]);
        check(x.nonzero(), &[0, 2]);
        check(x.masked_select(&bools(&shape)), &[0]);
        check(x.unique().map(|u| u.values), &[0]);
        check(x.softmax(0), &shape);
        check(x.log_softmax(1), &shape);
        check(x.normalize(2.0, 1, 1e-12), &shape);
        check(x.swiglu(), &[rows, columns / 2]);
        check(
            x.rope(
                &floats(&[rows, columns / 2]),
                &floats(&[rows, columns / 2]),
                RopeStyle::Interleaved,
            ),
            &shape,
        );
        check(x.dropout(0.5, Rng::new(1)), &shape);
        check(x.mse_loss(&x, mean), &[]);
        check(x.mse_loss(&x, LossReduction::None), &shape);
        check(
            Tensor::uniform(shape, 0.0, 1.0, DType::F32, &device(), Rng::new(1)),
            &shape,
        );
        check(x.to_device(&other_device()), &shape);
    }
    check(floats(&[0, 4]).layer_norm(&NormOptions::new()), &[0, 4]);
    check(
        floats(&[0, 4, 2]).batch_norm(&floats(&[4]), &floats(&[4]), &NormOptions::new()),
        &[0, 4, 2],
    );
    check(
        floats(&[0, 4]).cross_entropy(&ints(&[0]), &CrossEntropyOptions::default()),
        &[],
    );
    check(
        floats(&[0, 3, 5, 5]).conv2d(&floats(&[4, 3, 3, 3]), None, &Conv::default()),
        &[0, 4, 3, 3],
    );
    check(floats(&[5, 4]).embedding(&ints(&[0, 2])), &[0, 2, 4]);
    check(
        Tensor::dropout_mask([0, 3], 0.5, &device(), Rng::new(1)),
        &[0, 3],
    );
    // A product over no elements is zero, not nothing.
    assert_eq!(
        floats(&[2, 0])
            .matmul(&floats(&[0, 2]))
            .and_then(|x| x.to_vec::<f32>())
            .expect("valid"),
        [0.0; 4]
    );
}

#[test]
fn what_has_no_answer_for_no_elements_is_refused() {
    let x = floats(&[4, 0]);
    refused! {
        Argument "amax": x.amax(&[1], false);
        Argument "argmin": x.argmin(Some(1), false);
        Shape "layer_norm": x.layer_norm(&NormOptions::new());
        Shape "instance_norm": floats(&[2, 3, 0]).instance_norm(&NormOptions::new());
        Shape "batch_norm_train": floats(&[0, 3]).batch_norm_train(&NormOptions::new());
        Shape "cross_entropy": x.cross_entropy(&ints(&[4]), &CrossEntropyOptions::default());
        Shape "index_select": x.index_select(1, &ints(&[1]));
        Shape "embedding": floats(&[0, 4]).embedding(&ints(&[1]));
        Argument "concat": Tensor::concat(&[], 0);
        Argument "stack": Tensor::stack(&[], 0);
    }
}

#[test]
fn dimensions_of_two_to_the_31_are_views_or_errors() {
    const HUGE: usize = 1 << 31;
    let one = floats(&[1]);
    let wide = one.expand([HUGE]).expect("a view costs nothing");
    assert_eq!(wide.numel(), HUGE);
    assert_eq!(
        wide.narrow(0, HUGE - 2, 2)
            .and_then(|x| x.to_vec::<f32>())
            .expect("two elements"),
        [1.0; 2]
    );
    let column = floats(&[1, 1]).expand([HUGE, 1]).expect("a view");
    let row = column.t().expect("a matrix");
    refused! {
        SizeOverflow "expand": one.expand([HUGE, HUGE, HUGE]);
        SizeOverflow "add": column.add(&row);
        SizeOverflow "matmul": column.matmul(&row);
        SizeOverflow "full": Tensor::zeros([HUGE, HUGE, 2], DType::U8, &device());
        SizeOverflow "from_bytes": Tensor::from_slice::<f32>(&[], [HUGE, HUGE], &device());
        SizeOverflow "uniform": Tensor::uniform([HUGE, HUGE], 0.0, 1.0, DType::F32, &device(), Rng::new(1));
        Positions "permutation": Tensor::permutation(HUGE, &device(), Rng::new(1));
        SizeOverflow "dropout_mask": Tensor::dropout_mask([HUGE, HUGE], 0.5, &device(), Rng::new(1));
        SizeOverflow "rope_tables": Tensor::rope_tables(HUGE, 2 * HUGE, &RopeOptions::default(), &device());
        Positions "argsort": wide.argsort(0, Order::Ascending);
        Positions "topk": wide.topk(1, 0, Order::Descending);
        SizeOverflow "tile": one.tile(&[HUGE, HUGE]);
        SizeOverflow "pad": one.pad(&[(usize::MAX, 1)], PadMode::Constant(0.into()));
        SizeOverflow "one_hot": ints(&[8]).one_hot(1 << 60);
        SizeOverflow "outer": wide.outer(&wide);
        Positions "argmax": wide.argmax(None, false);
        Argument "narrow": wide.narrow(0, HUGE, 1);
        Shape "reshape": wide.reshape([HUGE - 1]);
    }
}

#[test]
fn memory_that_no_machine_has_is_refused() {
    let error = Tensor::zeros([1usize << 55], DType::F32, &device()).expect_err("128 PiB");
    assert!(
        matches!(error, Error::OutOfMemory { bytes, .. } if bytes == 1 << 57),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "cpu: there is no memory for a buffer of 144115188075855872 bytes: free some, shard the tensor over a mesh or use a smaller dtype"
    );
}

#[test]
fn padding_beyond_all_sizes_blames_the_shape_that_was_asked_for() {
    for dims in [[3usize, 2], [3, 0]] {
        let x = Tensor::zeros(dims, DType::F32, &device()).unwrap();
        for pair in [(usize::MAX, 1), (1, usize::MAX - 2)] {
            let error = x.pad(&[pair, (1, 0)], PadMode::Constant(0.into()));
            let shape = Shape::from([usize::MAX, dims[1] + 1]);
            assert_eq!(
                error.unwrap_err(),
                Error::SizeOverflow {
                    op: "pad",
                    shape: shape.into()
                }
            );
        }
    }
}

#[test]
fn dtypes_without_meaning_are_refused() {
    let (f, i, b) = (floats(&[2, 4]), ints(&[2, 4]), bools(&[2, 4]));
    let mean = LossReduction::Mean;
    refused! {
        DType "softmax": i.softmax(0);
        DType "log_softmax": b.log_softmax(0);
        DType "layer_norm": i.layer_norm(&NormOptions::new());
        DType "rms_norm": f.rms_norm(&NormOptions::new().weight(&ints(&[4])));
        DType "batch_norm": i.batch_norm(&floats(&[4]), &floats(&[4]), &NormOptions::new());
        DType "attention": ints(&[1, 1, 1, 1]).attention(&ints(&[1, 1, 1, 1]), &ints(&[1, 1, 1, 1]), &AttentionOptions::default());
        DType "attention": floats(&[1, 1, 1, 1]).attention(&floats(&[1, 1, 1, 1]), &floats(&[1, 1, 1, 1]), &within(&floats(&[1, 1]), &floats(&[1, 1])));
        DType "attention": floats(&[1, 1, 1, 1]).attention(&floats(&[1, 1, 1, 1]), &floats(&[1, 1, 1, 1]), &within(&ints(&[1, 1]), &bools(&[1, 1])));
        DType "cross_entropy": f.cross_entropy(&bools(&[2]), &CrossEntropyOptions::default());
        DType "cross_entropy": i.cross_entropy(&ints(&[2]), &CrossEntropyOptions::default());
        DType "nll_loss": f.nll_loss(&f, None, None, mean);
        DType "mse_loss": i.mse_loss(&i, mean);
        DType "rope": i.rope(&f, &f, RopeStyle::Half);
        DType "swiglu": i.swiglu();
        DType "dropout": i.dropout(0.5, Rng::new(1));
        DType "normalize": i.normalize(2.0, 0, 1e-12);
        DType "bitwise_and": f.bitwise_and(&f);
        DType "shl": f.shl(1);
        DType "neg": b.neg();
        DType "matmul": b.matmul(&b.t().expect("a matrix"));
        DType "grouped_matmul": i.grouped_matmul(&ints(&[1, 3, 4]), &ints(&[1]));
        DType "grouped_matmul": f.grouped_matmul(&floats(&[1, 3, 4]), &floats(&[1]));
        DType "grouped_outer": f.grouped_outer(&f, &bools(&[1]));
        DType "masked_select": f.masked_select(&i);
        DType "gather": f.gather(1, &f);
        DType "embedding": f.embedding(&b);
        DType "one_hot": f.one_hot(3);
        DType "uniform": Tensor::uniform([2], 0.0, 1.0, DType::I32, &device(), Rng::new(1));
        DType "randint": Tensor::randint([2], 0, 2, DType::F32, &device(), Rng::new(1));
        DType "to_vec": f.to_vec::<f64>();
    }
}

/// Attention within documents of queries and of keys.
fn within(queries: &Tensor, keys: &Tensor) -> AttentionOptions {
    AttentionOptions {
        documents: Some([queries.clone(), keys.clone()]),
        ..Default::default()
    }
}

#[test]
fn operands_on_different_devices_are_refused() {
    let x = floats(&[2, 4]);
    let there = |t: &Tensor| t.to_device(&other_device()).expect("a copy");
    let y = there(&x);
    let index = there(&ints(&[2]));
    let q = floats(&[1, 1, 2, 4]);
    let options = CrossEntropyOptions::default();
    refused! {
        DeviceMismatch "add": x.add(&y);
        DeviceMismatch "where_": bools(&[2, 4]).where_(&x, &y);
        DeviceMismatch "matmul": x.matmul(&y.t().expect("a matrix"));
        DeviceMismatch "linear": x.linear(&y, None);
        DeviceMismatch "grouped_outer": x.grouped_outer(&x, &index);
        DeviceMismatch "einsum": Tensor::einsum("ab,ab->a", &[&x, &y]);
        DeviceMismatch "concat": Tensor::concat(&[&x, &y], 0);
        DeviceMismatch "stack": Tensor::stack(&[&x, &y], 0);
        DeviceMismatch "index_select": x.index_select(0, &index);
        DeviceMismatch "embedding": x.embedding(&index);
        DeviceMismatch "index_put": x.index_put(&[&index], &x, ScatterOp::Set);
        DeviceMismatch "masked_select": x.masked_select(&there(&bools(&[2, 4])));
        DeviceMismatch "searchsorted": x.searchsorted(&y, Side::Left);
        DeviceMismatch "conv2d": floats(&[1, 1, 3, 3]).conv2d(&there(&floats(&[1, 1, 2, 2])), None, &Conv::default());
        DeviceMismatch "layer_norm": x.layer_norm(&NormOptions::new().weight(&there(&floats(&[4]))));
        DeviceMismatch "group_norm": x.group_norm(2, &NormOptions::new().bias(&there(&floats(&[4]))));
        DeviceMismatch "batch_norm": x.batch_norm(&floats(&[4]), &there(&floats(&[4])), &NormOptions::new());
        DeviceMismatch "attention": q.attention(&q, &there(&q), &AttentionOptions::default());
        DeviceMismatch "attention": q.attention(&q, &q, &AttentionOptions { mask: Some(there(&bools(&[2, 2]))), ..Default::default() });
        DeviceMismatch "attention": q.attention(&q, &q, &within(&ints(&[1, 2]), &there(&ints(&[1, 2]))));
        DeviceMismatch "cross_entropy": x.cross_entropy(&index, &options);
        DeviceMismatch "mse_loss": x.mse_loss(&y, LossReduction::None);
        DeviceMismatch "l1_loss": x.l1_loss(&y, LossReduction::Sum);
        DeviceMismatch "cosine_similarity": x.cosine_similarity(&y, 1, 1e-8);
        DeviceMismatch "rope": x.rope(&floats(&[2, 2]), &there(&floats(&[2, 2])), RopeStyle::Half);
        DeviceMismatch "swiglu2": x.swiglu2(&y);
        DeviceMismatch "dropout_add": x.dropout_add(&y, 0.5, Rng::new(1));
    }
}

#[test]
fn nan_is_the_largest_value_of_a_sort_and_wins_every_maximum() {
    let nan = f32::NAN;
    let x = Tensor::from_slice(&[2.0, nan, -1.0, nan, 3.0], [5], &device()).expect("fits");
    let positions =
        |t: Result<(Tensor, Tensor)>| t.and_then(|(_, at)| at.to_vec::<i32>()).expect("valid");
    assert_eq!(positions(x.sort(0, Order::Ascending)), [2, 0, 4, 1, 3]);
    assert_eq!(positions(x.sort(0, Order::Descending)), [1, 3, 4, 0, 2]);
    assert_eq!(positions(x.topk(2, 0, Order::Descending)), [1, 3]);
    assert_eq!(positions(x.topk(2, 0, Order::Ascending)), [2, 0]);
    assert_eq!(positions(x.kthvalue(4, 0, true)), [1]);
    let value = |t: Result<Tensor>| t.and_then(|t| t.to_vec::<f32>()).expect("valid");
    assert!(value(x.amax(&[], false))[0].is_nan());
    assert!(value(x.amin(&[], false))[0].is_nan());
    assert!(value(x.maximum(0.0))[1].is_nan());
    assert_eq!(
        x.argmax(None, false)
            .and_then(|t| t.to_vec::<i32>())
            .expect("valid"),
        [1]
    );
    assert_eq!(
        x.argmin(None, false)
            .and_then(|t| t.to_vec::<i32>())
            .expect("valid"),
        [1]
    );
    assert_eq!(value(x.fmax(0.0)), [2.0, 0.0, 0.0, 0.0, 3.0]);
    assert_eq!(
        x.unique()
            .and_then(|u| u.counts.to_vec::<i32>())
            .expect("valid"),
        [1, 1, 1, 2]
    );
    assert!(value(x.softmax(0)).iter().all(|v| v.is_nan()));
}

#[test]
fn indices_out_of_range_are_refused() {
    let x = floats(&[3, 4]);
    let at = |i: i64| Tensor::from_slice(&[i], [1], &device()).expect("fits");
    let deep = |i: i64| Tensor::from_slice(&[i], [1, 1], &device()).expect("fits");
    let source = floats(&[1, 1]);
    for bad in [3, -4, i64::MAX, i64::MIN] {
        refused! {
            IndexOutOfRange "index_select": x.index_select(0, &at(bad)).and_then(|t| t.to_bytes());
            IndexOutOfRange "gather": x.gather(0, &deep(bad)).and_then(|t| t.to_bytes());
            IndexOutOfRange "take_along_axis": x.take_along_axis(0, &deep(bad)).and_then(|t| t.to_bytes());
            IndexOutOfRange "gather_nd": x.gather_nd(&at(bad)).and_then(|t| t.to_bytes());
            IndexOutOfRange "embedding": x.embedding(&at(bad)).and_then(|t| t.to_bytes());
            IndexOutOfRange "index_get": x.index_get(&[&at(bad)]).and_then(|t| t.to_bytes());
            IndexOutOfRange "scatter": x.scatter(0, &deep(bad), &source, ScatterOp::Add).and_then(|t| t.to_bytes());
            IndexOutOfRange "index_put": x.index_put(&[&at(bad)], &source, ScatterOp::Add).and_then(|t| t.to_bytes());
            IndexOutOfRange "index_add": x.index_add(0, &at(bad), &floats(&[1, 4])).and_then(|t| t.to_bytes());
            IndexOutOfRange "scatter_nd_add": x.scatter_nd_add(&at(bad), &floats(&[4])).and_then(|t| t.to_bytes());
        }
    }
    let loss = |class: i64| {
        floats(&[1, 3])
            .cross_entropy(&at(class), &CrossEntropyOptions::default())
            .and_then(|t| t.to_bytes())
    };
    refused! {
        IndexOutOfRange "cross_entropy": loss(3);
        IndexOutOfRange "cross_entropy": loss(-1);
        IndexOutOfRange "bincount": at(7).bincount_bins(None, 3).and_then(|t| t.to_bytes());
        IndexOutOfRange "bincount": at(-1).bincount_bins(None, 3).and_then(|t| t.to_bytes());
    }
    assert!(
        x.index_select(0, &at(-3))
            .and_then(|t| t.to_bytes())
            .is_ok(),
        "negative indices count from the end"
    );
}

#[test]
fn axes_that_do_not_exist_or_come_twice_are_refused() {
    let x = floats(&[2, 3]);
    let index = ints(&[2, 3]);
    for bad in [2, -3, i64::MAX, i64::MIN] {
        refused! {
            Axis "sum": x.sum(&[bad], false);
            Axis "mean": x.mean(&[0, bad], false);
            Axis "argmax": x.argmax(Some(bad), false);
            Axis "cumsum": x.cumsum(bad);
            Axis "softmax": x.softmax(bad);
            Axis "log_softmax": x.log_softmax(bad);
            Axis "normalize": x.normalize(2.0, bad, 1e-12);
            Axis "cosine_similarity": x.cosine_similarity(&x, bad, 1e-8);
            Axis "sort": x.sort(bad, Order::Ascending);
            Axis "topk": x.topk(1, bad, Order::Descending);
            Axis "gather": x.gather(bad, &index);
            Axis "take_along_axis": x.take_along_axis(bad, &index);
            Axis "scatter": x.scatter(bad, &index, &x, ScatterOp::Set);
            Axis "concat": Tensor::concat(&[&x, &x], bad);
            Axis "transpose": x.transpose(0, bad);
            Axis "flip": x.flip(&[bad]);
            Axis "roll": x.roll(&[1], &[bad]);
            Axis "narrow": x.narrow(bad, 0, 1);
            Axis "unbind": x.unbind(bad);
            Axis "squeeze": x.squeeze(&[bad]);
        }
    }
    refused! {
        Axis "sum": x.sum(&[0, -2], false);
        Axis "permute": x.permute(&[0, 0]);
        Axis "flip": x.flip(&[1, -1]);
        Axis "stack": Tensor::stack(&[&x, &x], 3);
        Axis "unsqueeze": x.unsqueeze(-4);
    }
}

#[test]
fn numbers_outside_their_domain_are_refused() {
    let x = floats(&[2, 4]);
    let mean = LossReduction::Mean;
    refused! {
        Argument "layer_norm": x.layer_norm(&NormOptions::new().eps(f64::NAN));
        Argument "layer_norm": x.layer_norm(&NormOptions::new().dims(3));
        Argument "rms_norm": x.rms_norm(&NormOptions::new().eps(-1.0));
        Argument "group_norm": x.group_norm(3, &NormOptions::new());
        Argument "group_norm": x.group_norm(0, &NormOptions::new());
        Argument "batch_norm_train": x.batch_norm_train(&NormOptions::new().eps(f64::INFINITY));
        Argument "dropout": x.dropout(1.5, Rng::new(1));
        Argument "dropout_mask": Tensor::dropout_mask([2], f64::NAN, &device(), Rng::new(1));
        Argument "smooth_l1_loss": x.smooth_l1_loss(&x, -1.0, mean);
        Argument "huber_loss": x.huber_loss(&x, 0.0, mean);
        Argument "triplet_margin_loss": x.triplet_margin_loss(&x, &x, &TripletMargin { p: 0.0, reduction: mean, ..Default::default() });
        Argument "rope_tables": Tensor::rope_tables(2, 3, &RopeOptions::default(), &device());
        Argument "rope_tables": Tensor::rope_tables(2, 4, &RopeOptions { base: 0.0, ..Default::default() }, &device());
        Argument "topk": x.topk(5, 1, Order::Descending);
        Argument "uniform": Tensor::uniform([2], 1.0, 0.0, DType::F32, &device(), Rng::new(1));
        Argument "bernoulli": Tensor::bernoulli([2], 2.0, DType::F32, &device(), Rng::new(1));
        Argument "full": Tensor::full([2], 300, DType::U8, &device());
        Argument "add": Tensor::zeros([2], DType::U8, &device()).and_then(|x| x.add(300));
        DivisionByZero "floor_div": ints(&[2]).floor_div(0).and_then(|t| t.to_bytes());
        DivisionByZero "remainder": ints(&[2]).remainder(0).and_then(|t| t.to_bytes());
    }
    let scale = AttentionOptions {
        scale: Some(f64::NAN),
        ..Default::default()
    };
    let q = floats(&[1, 1, 1, 1]);
    refused! { Argument "attention": q.attention(&q, &q, &scale); }
}

mod told;
