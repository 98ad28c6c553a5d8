//! Models: names, first values, freezing, loading, and layers on meshes.

use anymesh_checkpoint::{Load, Memory, TensorInfo};
use anymesh_core::{DType, Mesh, Tensor, meta, ops::Rng};
use anymesh_train::{
    Build, Error, Init, Module, Pass, Policy, Result, Summary, Zero,
    nn::{
        Activation, Attend, BatchNorm, Block, ConvBlock, Embedding, GatedMlp, GroupNorm, Heads,
        Linear, NormOrder, RmsNorm, same_document,
    },
};

#[derive(Module)]
struct Tied {
    #[name = "model.embed_tokens"]
    embed: Embedding,
    #[name = "model.layers"]
    layers: Vec<GatedMlp>,
    #[name = "model.norm"]
    norm: RmsNorm,
    #[skip]
    _width: usize,
}

impl Tied {
    fn new(b: &Build) -> Result<Self> {
        let at = b.at("model.embed_tokens");
        let mlp = |i: usize| {
            let at = b.at(format!("model.layers.{i}"));
            GatedMlp::new(&at, [6, 10], false, Init::Normal(0.5), Init::Normal(0.25))
        };
        Ok(Self {
            embed: Embedding::new(&at, [14, 6], "[@tp?, _]", Init::Normal(1.0))?,
            layers: (0..2).map(mlp).collect::<Result<_>>()?,
            norm: RmsNorm::new(&b.at("model.norm"), 6, 1e-6)?,
            _width: 6,
        })
    }
}

/// A model whose files may have the head, the embedding, or both.
struct WithHead(Tied);

impl Module for WithHead {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &anymesh_train::Param)) {
        self.0.visit(path, f);
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut anymesh_train::Param)) {
        self.0.visit_mut(path, f);
    }

    fn tied(&self) -> Vec<(String, String)> {
        vec![("lm_head.weight".into(), "model.embed_tokens.weight".into())]
    }
}

fn cpu() -> anymesh_core::Device {
    anymesh_backend_cpu::device()
}

fn build(mesh: &Mesh) -> Build {
    Build::new(mesh, Policy::f32(), 3)
}

#[test]
fn names_are_paths_of_fields() -> Result<()> {
    let model = Tied::new(&Build::new(&cpu(), Policy::f32(), 3))?;
    let names = model.names();
    assert_eq!(names[0], "model.embed_tokens.weight");
    assert_eq!(names[1], "model.layers.0.gate_proj.weight");
    assert_eq!(names[7], "model.norm.weight");
    assert_eq!((names.len(), model.count()), (8, 14 * 6 + 6 * 60 + 6));
    // The name that a parameter was built with is the one it is found by.
    model.visit("", &mut |name, p| assert_eq!(name, p.name()));
    Ok(())
}

#[test]
fn first_values_depend_on_seed_and_name_alone() -> Result<()> {
    let whole = Tied::new(&build(&Mesh::single(&cpu())))?.values();
    for axes in ["tp=2", "tp=3", "dp=2, tp=2"] {
        for zero in [Zero::Off, Zero::One, Zero::Three] {
            let mesh = Mesh::new(axes, &cpu())?;
            let there = Tied::new(&build(&mesh).zero(zero, &["dp"]))?.values();
            for (name, value) in &whole {
                let there = there[name].full_tensor()?;
                assert_eq!(
                    value.to_vec::<f32>()?,
                    there.to_vec::<f32>()?,
                    "{name} on {axes}"
                );
            }
        }
    }
    // A process that builds one layer only.
    let b = build(&Mesh::single(&cpu())).at("model.layers.1");
    let layer = GatedMlp::new(&b, [6, 10], false, Init::Normal(0.5), Init::Normal(0.25))?;
    let alone = layer.up_proj.weight.value().to_vec::<f32>()?;
    assert_eq!(
        alone,
        whole["model.layers.1.up_proj.weight"].to_vec::<f32>()?
    );
    let other = Tied::new(&Build::new(&cpu(), Policy::f32(), 4))?.values();
    assert_ne!(
        alone,
        other["model.layers.1.up_proj.weight"].to_vec::<f32>()?
    );
    Ok(())
}

#[test]
fn frozen_parameters_have_no_gradient() -> Result<()> {
    let mut model = Tied::new(&build(&Mesh::single(&cpu())))?;
    assert_eq!(model.freeze("*embed*, *.norm.*")?, 2);
    let x = Tensor::ones([3, 6], DType::F32, &cpu())?;
    let y = model.layers[0].forward(&model.norm.forward(&x)?)?;
    let gradients = y.sum_all()?.backward()?;
    assert!(model.norm.weight.partial_gradient(&gradients)?.is_none());
    let trained = &model.layers[0].up_proj.weight;
    assert!(trained.partial_gradient(&gradients)?.is_some());
    // Not used by this loss, which is no error here: who steps decides.
    assert!(
        model.layers[1]
            .up_proj
            .weight
            .partial_gradient(&gradients)?
            .is_none()
    );
    assert_eq!(model.unfreeze("*")?, 8);

    let error = model.freeze("*.nrom.*").unwrap_err().to_string();
    assert!(error.contains("'*.nrom.*' fits no parameter"), "{error}");
    assert!(matches!(model.freeze("a,,b"), Err(Error::Pattern { .. })));
    Ok(())
}

fn info(value: &Tensor) -> TensorInfo {
    TensorInfo {
        dtype: value.dtype(),
        shape: value.dims().to_vec(),
    }
}

fn file(model: &dyn Module, rename: Option<(&str, &str)>) -> Result<Memory> {
    let mut file = Memory::default();
    for (name, value) in model.values() {
        let name = match rename {
            Some((from, to)) if name == from => to.to_string(),
            _ => name,
        };
        file.insert(name, info(&value), value.to_bytes()?)?;
    }
    Ok(file)
}

#[test]
fn a_tied_parameter_is_found_under_either_name() -> Result<()> {
    let other = Tied::new(&Build::new(&cpu(), Policy::f32(), 9))?;
    let embedding = "model.embed_tokens.weight";
    let wanted = other.values()[embedding].to_vec::<f32>()?;
    for rename in [None, Some((embedding, "lm_head.weight"))] {
        let mesh = Mesh::new("tp=3", &cpu())?;
        let mut model = WithHead(Tied::new(&build(&mesh))?);
        model.load(&file(&other, rename)?, Load::default())?;
        assert_eq!(
            model.values()[embedding].full_tensor()?.to_vec::<f32>()?,
            wanted
        );
    }
    let mut both = file(&other, None)?;
    let head = &other.values()[embedding];
    both.insert("lm_head.weight", info(head), head.to_bytes()?)?;
    WithHead(Tied::new(&build(&Mesh::single(&cpu())))?).load(&both, Load::default())?;
    Ok(())
}

#[test]
fn what_a_file_lacks_or_has_too_much_is_an_error() -> Result<()> {
    let other = Tied::new(&Build::new(&cpu(), Policy::f32(), 9))?;
    let mut model = Tied::new(&build(&Mesh::single(&cpu())))?;
    let before = model.values()["model.norm.weight"].to_vec::<f32>()?;
    let renamed = file(&other, Some(("model.norm.weight", "model.nrm.weight")))?;
    let error = model
        .load(&renamed, Load::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("model.norm.weight"), "{error}");
    assert_eq!(model.values()["model.norm.weight"].to_vec::<f32>()?, before);
    let error = model
        .set_values(&[("x".to_string(), other.norm.weight.value().clone())].into())
        .unwrap_err();
    assert!(matches!(error, Error::Parameter { .. }));
    Ok(())
}

#[test]
fn a_model_of_any_size_costs_nothing_without_memory() -> Result<()> {
    let mesh = Mesh::new("dp=64, tp=8", &meta())?;
    let b = Build::new(&mesh, Policy::bf16(), 0).zero(Zero::Three, &["dp"]);
    let layer = GatedMlp::new(&b, [16384, 53248], false, Init::Normal(0.02), Init::Zeros)?;
    let summary = Summary::of(&layer);
    assert_eq!(summary.values, 3 * 16384 * 53248);
    assert_eq!(summary.bytes, 3 * 16384 * 53248 * 4 / 512);
    assert_eq!(summary.rows[0].ty, "f32[53248@tp@dp, 16384]");
    assert_eq!(summary.rows[0].compute, "bf16[53248@tp, 16384]");
    assert!(summary.to_string().contains("2617245696 values"));
    Ok(())
}

/// The same layer with and without a mesh gives the same output.
fn same_on_meshes(f: impl Fn(&Mesh) -> Result<Tensor>) -> Result<()> {
    let alone = f(&Mesh::single(&cpu()))?.to_vec::<f64>()?;
    for axes in ["dp=2", "tp=2", "tp=3", "dp=2, tp=2"] {
        let there = f(&Mesh::new(axes, &cpu())?)?
            .full_tensor()?
            .to_vec::<f64>()?;
        let apart = alone.iter().zip(&there).map(|(a, b)| (a - b).abs());
        let apart = apart.fold(0.0, f64::max);
        assert!(apart < 1e-12, "{apart:e} apart on {axes}");
    }
    Ok(())
}

#[test]
fn layers_give_the_same_on_every_mesh() -> Result<()> {
    let policy = Policy::all(DType::F64);
    let input = |mesh: &Mesh, shape: &[usize]| {
        let sharding = "[@dp?, ...]";
        Tensor::normal(shape, 0.0, 1.0, DType::F64, (mesh, sharding), Rng::new(5))
    };
    for order in [NormOrder::Pre, NormOrder::Post] {
        for sequence_parallel in [false, true] {
            for causal in [false, true] {
                same_on_meshes(|mesh| {
                    let b = Build::new(mesh, policy, 1).sequence_parallel(sequence_parallel);
                    let heads = Heads {
                        queries: 6,
                        keys: 3,
                        size: 4,
                    };
                    let block = Block::new(&b, [24, 40], heads, 0.2, order)?;
                    let documents = Tensor::from_fn([4, 6], (mesh, "[@dp?, _]"), |at| {
                        (at[1] * (1 + at[0] % 2) / 4) as i32
                    })?;
                    let attend = Attend {
                        causal,
                        mask: Some(same_document(&documents)?),
                        ..Attend::default()
                    };
                    let pass = Pass::train(Rng::new(8));
                    block.forward(&input(mesh, &[4, 6, 24])?, &attend, None, &pass)
                })?;
            }
        }
    }
    same_on_meshes(|mesh| {
        let b = Build::new(mesh, policy, 1);
        let norm = GroupNorm::new(&b, 2, 6, 1e-5)?;
        norm.forward(&input(mesh, &[4, 6, 5])?)
    })?;
    same_on_meshes(|mesh| {
        let b = Build::new(mesh, policy, 1);
        let mut block = ConvBlock::new(
            &b,
            [3, 6],
            [3, 3],
            anymesh_core::ops::Conv::default(),
            Some(Activation::Silu),
        )?;
        let x = input(mesh, &[4, 3, 6, 5])?;
        let trained = block.forward(&x, &Pass::train(Rng::new(1)))?;
        trained
            .add(&block.forward(&x, &Pass::eval())?)
            .map_err(Into::into)
    })
}

#[test]
fn running_statistics_are_part_of_a_model_and_not_trained() -> Result<()> {
    let b = Build::new(&cpu(), Policy::f32(), 1);
    let mut norm = BatchNorm::new(&b, 2, 0.5, 0.0)?;
    let x = Tensor::from_slice(&[1f32, 10.0, 3.0, 30.0], [2, 2], &cpu())?;
    let y = norm.forward(&x, &Pass::train(Rng::new(1)))?;
    assert_eq!(y.to_vec::<f32>()?, [-1.0, -1.0, 1.0, 1.0]);
    assert_eq!(norm.running_mean.value().to_vec::<f32>()?, [1.0, 10.0]);
    assert_eq!(norm.running_var.value().to_vec::<f32>()?, [1.5, 100.5]);
    assert!(!norm.running_mean.is_trainable());
    assert_eq!(norm.names().len(), 4);
    Ok(())
}

#[test]
fn several_linears_of_one_input_are_each_alone() -> Result<()> {
    let b = Build::new(&cpu(), Policy::f32(), 1);
    let linear = |name: &str, out| -> Result<Linear> {
        Linear::new(&b.at(name), [4, out], "[@tp?, _]", Init::Normal(1.0))?.with_bias(&b.at(name))
    };
    let (q, k) = (linear("q", 6)?, linear("k", 2)?);
    let x = Tensor::normal([3, 4], 0.0, 1.0, DType::F32, &cpu(), Rng::new(2))?;
    let each = Linear::forward_each(&x, &[&q, &k])?;
    assert_eq!(each[0].to_vec::<f32>()?, q.forward(&x)?.to_vec::<f32>()?);
    assert_eq!(each[1].to_vec::<f32>()?, k.forward(&x)?.to_vec::<f32>()?);
    assert!(matches!(Heads::of(10, 3), Err(Error::Config { .. })));
    Ok(())
}
