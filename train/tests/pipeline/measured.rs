//! Stages by what layers cost on their devices.

use super::support::{tied, untied};
use anymesh_core::{DType, Mesh, Tensor, transport::Threads};
use anymesh_schedule::Placement;
use anymesh_train::{
    Build, Init, Module, Pass, Policy, Result,
    config::{RunConfig, parse},
    nn::Linear,
    pipeline::{Given, LayerCosts, Split, Staged, measure},
};
use std::time::Duration;

/// A layer takes the stream to its own width and back.
#[derive(Module)]
struct Both {
    up: Linear,
    down: Linear,
}

#[derive(Module)]
struct Uneven {
    layers: Vec<Both>,
    #[skip]
    split: Split,
}

const WIDTH: usize = 8;
/// Two of them cost far more than all others together.
const INNER: [usize; 6] = [4, 4, 4, 4, 6000, 6000];

impl Uneven {
    fn new(mesh: &Mesh) -> Result<Self> {
        let split = Split::one_by_one(mesh, INNER.len())?;
        let layer = |(i, inner): (usize, &usize)| {
            let b = Build::new(split.mesh_of(split.stage_of(i)), Policy::f32(), 1);
            let linear = |name: &str, sizes| {
                Linear::new(
                    &b.at(format!("{i}.{name}")),
                    sizes,
                    "[_, _]",
                    Init::Normal(0.1),
                )
            };
            Ok(Both {
                up: linear("up", [WIDTH, *inner])?,
                down: linear("down", [*inner, WIDTH])?,
            })
        };
        Ok(Self {
            layers: INNER.iter().enumerate().map(layer).collect::<Result<_>>()?,
            split,
        })
    }
}

impl Staged for Uneven {
    type Batch = Tensor;

    fn model(&self) -> &dyn Module {
        self
    }

    fn stages(&self) -> usize {
        self.split.stages()
    }

    fn mesh_of(&self, stage: usize) -> &Mesh {
        self.split.mesh_of(stage)
    }

    fn forward(
        &self,
        stage: usize,
        given: &Given<'_>,
        batch: &Tensor,
        _: &Pass,
    ) -> Result<Vec<Tensor>> {
        let mut x = given.inputs.first().unwrap_or(batch).clone();
        for Both { up, down } in &self.layers[self.split.layers(stage)] {
            x = down.forward(&up.forward(&x)?)?;
        }
        Ok(vec![match stage + 1 == self.stages() {
            true => x.square()?.sum_all()?,
            false => x,
        }])
    }
}

fn costs(mesh: &Mesh) -> Result<LayerCosts> {
    let model = Uneven::new(mesh)?;
    let batch = Tensor::ones([64, WIDTH], DType::F32, model.mesh_of(0))?;
    let seconds = measure(&model, &batch, mesh, 2)?;
    assert_eq!(seconds.len(), INNER.len() + 2);
    assert!(seconds.iter().all(|s| *s > 0.0), "{seconds:?}");
    Ok(LayerCosts {
        first: seconds[0],
        layers: seconds[1..=INNER.len()].to_vec(),
        last: seconds[INNER.len() + 1],
    })
}

/// The two large ones are apart; by their number they would not be.
fn hold(mesh: &Mesh, c: &LayerCosts) -> Result<()> {
    let split = Split::balanced(mesh, &c.layers, c.first, c.last, 1, Placement::Loop)?;
    assert_eq!(split.layers(1), 5..6, "{c:?}");
    Ok(())
}

#[test]
fn stages_are_balanced_by_the_time_that_layers_take() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let mesh = Mesh::new("pp=2", &cpu)?;
    hold(&mesh, &costs(&mesh)?)?;
    let even = Split::balanced(&mesh, &[1.0; 6], 0.0, 0.0, 1, Placement::Loop)?;
    assert_eq!(even.layers(1), 3..6);

    // Each process measures its own layers, and all get the same numbers.
    let mesh = mesh.with_transport(Threads::new(Duration::from_secs(60)));
    let told = std::thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let mesh = &mesh;
            scope.spawn(move || costs(&mesh.addressing(&[rank])?))
        });
        threads.map(|thread| thread.join().expect("no panic"))
    });
    let [first, second] = told;
    let first = first?;
    assert_eq!(first, second?);
    hold(&mesh, &first)
}

#[test]
fn a_run_may_be_split_by_measuring() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("anymesh-measured-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let text = folder.join("text.txt");
    std::fs::write(&text, "some words ".repeat(50)).expect("written");
    let toml = format!(
        r#"
        tokenizer = "bytes"
        data = [{{ path = {text:?} }}]
        [model]
        model_type = "gpt2"
        vocab_size = 257
        n_positions = 16
        n_embd = 8
        n_layer = 5
        n_head = 2
        [batch]
        global = 8
        accumulation = 4
        length = 16
        [mesh]
        axes = "pp=2, dp=2"
        [pipeline]
        split = "measured"
        [run]
        steps = 2
        "#
    );
    let config = parse::<RunConfig>(&toml, &["run.seed=1"])?;
    let mesh = Mesh::new(&config.mesh.axes, &anymesh_backend_cpu::device())?;
    let prepared = config.prepare(&mesh)?;
    let split = prepared.trainer.task.model.split();
    assert_eq!((split.stages(), split.count()), (2, 5));
    std::fs::remove_dir_all(&folder).ok();
    assert!(parse::<RunConfig>(&toml, &["pipeline.split=guessed"]).is_err());
    // What was measured must be of this model.
    let build = Build::new(&mesh, Policy::f32(), 1).with_costs(LayerCosts {
        layers: vec![1.0; 4],
        ..LayerCosts::default()
    });
    assert!(untied().build(&build).is_ok());
    let error = tied().build(&build).expect_err("it has five layers");
    assert!(error.to_string().contains("the model has 5"), "{error}");
    Ok(())
}
