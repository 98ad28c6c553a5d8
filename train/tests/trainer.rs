//! What a run does beside training: skipping, stopping, saving, going on, evaluating.

use anymesh_core::{Mesh, Tensor};
use anymesh_train::{
    Build, Error, Init, Module, Pass, Policy, Result,
    nn::Linear,
    optim::{AdamW, Groups, Optimizer, Rule, Schedule},
    trainer::{Evaluate, Event, Feed, Finished, Guard, Save, Settings, Task, Trainer},
};
use std::{cell::Cell, path::PathBuf, rc::Rc};

/// A line through points: `y = 3 x - 1`.
struct Line {
    layer: Linear,
    mesh: Mesh,
    /// What a device that cannot be trusted adds, another each time.
    noise: Option<f64>,
    calls: u64,
}

impl Line {
    fn new(mesh: &Mesh) -> Result<Self> {
        let b = Build::new(mesh, Policy::f32(), 5);
        Ok(Self {
            layer: Linear::new(&b, [1, 1], "[_, _]", Init::Zeros)?.with_bias(&b)?,
            mesh: mesh.clone(),
            noise: None,
            calls: 0,
        })
    }
}

impl Task for Line {
    type Batch = Tensor;

    fn model(&self) -> &dyn Module {
        &self.layer
    }

    fn model_mut(&mut self) -> &mut dyn Module {
        &mut self.layer
    }

    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn count(&self, batch: &Tensor) -> Result<f64> {
        Ok(batch.numel() as f64)
    }

    fn loss(&mut self, x: &Tensor, _: &Pass) -> Result<Tensor> {
        self.calls += 1;
        let noise = self.noise.map_or(0.0, |noise| noise * self.calls as f64);
        let wanted = x.mul(3.0 + noise)?.sub(1.0)?;
        Ok(self.layer.forward(x)?.sub(&wanted)?.square()?.sum_all()?)
    }
}

/// Points by their positions, some of which are broken.
struct Points {
    mesh: Mesh,
    broken: Vec<u64>,
    end: u64,
}

impl Points {
    fn new(mesh: &Mesh) -> Self {
        Self {
            mesh: mesh.clone(),
            broken: vec![],
            end: u64::MAX,
        }
    }
}

const BATCH: u64 = 8;

impl Feed<Tensor> for Points {
    fn global_batch(&mut self, consumed: u64) -> Result<Option<(Vec<Tensor>, u64)>> {
        if consumed >= self.end {
            return Ok(None);
        }
        let half = |first: u64| {
            Tensor::from_fn([BATCH as usize / 2, 1], (&self.mesh, "[@dp?, _]"), |at| {
                let position = first + at[0] as u64;
                match self.broken.contains(&position) {
                    true => f32::NAN,
                    false => (position * 37 % 19) as f32 / 10.0 - 0.9,
                }
            })
        };
        let batches = vec![half(consumed)?, half(consumed + BATCH / 2)?];
        Ok(Some((batches, BATCH)))
    }
}

fn mesh() -> Mesh {
    Mesh::new("dp=2", &anymesh_backend_cpu::device()).expect("a mesh")
}

fn trainer(settings: Settings) -> Result<Trainer<Line>> {
    let task = Line::new(&mesh())?;
    let rule = Rule::AdamW(AdamW {
        lr: 0.1,
        decay: 0.0,
        ..AdamW::default()
    });
    let optimizer = Optimizer::new(&task.layer, &Groups::all(rule))?;
    let schedule = Schedule::Constant {
        warmup: 0,
        warmup_from: 0.0,
    };
    Trainer::new(task, optimizer, schedule, settings)
}

fn folder(name: &str) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("anymesh-trainer-{name}-{}", std::process::id()));
    std::fs::remove_dir_all(&folder).ok();
    std::fs::remove_file(&folder).ok();
    folder
}

fn values(trainer: &Trainer<Line>) -> Vec<Vec<f32>> {
    let values = trainer.task.model().values();
    values
        .values()
        .map(|t| t.to_vec::<f32>().expect("on the host"))
        .collect()
}

#[test]
fn a_run_learns_and_evaluates() -> Result<()> {
    let settings = Settings {
        steps: 250,
        evaluate: Evaluate {
            every: 100,
            batches: 3,
        },
        ..Settings::default()
    };
    let mut trainer = trainer(settings)?;
    let (mut feed, mut other) = (Points::new(&mesh()), Points::new(&mesh()));
    let (mut evaluations, mut counted) = (vec![], 0.0);
    let finished = trainer.run(&mut feed, Some(&mut other), &mut |event| match event {
        Event::Evaluated { step, loss, .. } => evaluations.push((*step, *loss)),
        Event::Step { report, .. } => counted += report.count,
        _ => {}
    })?;
    assert_eq!(finished, Finished::Done);
    assert_eq!(counted, 250.0 * BATCH as f64);
    let steps: Vec<u64> = evaluations.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [100, 200, 250], "every hundred, and at the end");
    assert!(evaluations[2].1 < 1e-3, "{evaluations:?}");
    Ok(())
}

#[test]
fn a_step_that_is_not_finite_is_skipped_and_told() -> Result<()> {
    let mut trainer = trainer(Settings::default())?;
    let mut feed = Points::new(&mesh());
    feed.broken = vec![2 * BATCH + 5];
    let mut reports = vec![];
    for step in 0..4 {
        let before = values(&trainer);
        let report = trainer.step(&mut feed)?.expect("there is data");
        assert_eq!(values(&trainer) == before, step == 2, "step {step}");
        reports.push(report);
    }
    assert!(
        reports[2].skipped && reports[2].loss.is_nan(),
        "never hidden"
    );
    assert_eq!(reports[2].samples, 16..24);
    assert_eq!(reports[3].samples, 24..32, "the data goes on");
    assert!(!reports[3].skipped);
    Ok(())
}

#[test]
fn too_many_skips_in_a_row_end_the_run() -> Result<()> {
    let settings = Settings {
        guard: Guard {
            max_skips: 3,
            ..Guard::default()
        },
        ..Settings::default()
    };
    let mut trainer = trainer(settings)?;
    let mut feed = Points::new(&mesh());
    feed.broken = (5..1000).collect();
    let error = trainer.run(&mut feed, None, &mut |_| {}).unwrap_err();
    let Error::Stopped { step, detail } = &error else {
        panic!("{error}")
    };
    assert_eq!(*step, 3);
    assert!(detail.contains("samples 16..24"), "{detail}");
    Ok(())
}

#[test]
fn a_step_that_differs_when_it_is_run_again_names_the_device() -> Result<()> {
    let settings = Settings {
        guard: Guard {
            rerun_every: 2,
            ..Guard::default()
        },
        ..Settings::default()
    };
    let mut trainer = trainer(settings)?;
    let mut feed = Points::new(&mesh());
    for _ in 0..4 {
        trainer.step(&mut feed)?;
    }
    trainer.task.noise = Some(1e-3);
    trainer.step(&mut feed)?; // not looked at
    let before = values(&trainer);
    let error = trainer.step(&mut feed).unwrap_err().to_string();
    assert!(
        error.contains("'bias'") && error.contains("rank 0 (cpu)"),
        "{error}"
    );
    assert_eq!(values(&trainer), before, "nothing was changed by it");
    Ok(())
}

#[test]
fn a_run_that_is_asked_to_stop_saves_and_goes_on_later() -> Result<()> {
    let root = folder("stop");
    let settings = Settings {
        steps: 12,
        ema: Some(0.9),
        save: Save {
            folder: Some(root.clone()),
            ..Save::default()
        },
        ..Settings::default()
    };
    let mut whole = trainer(Settings {
        save: Save::default(),
        ..settings.clone()
    })?;
    whole.run(&mut Points::new(&mesh()), None, &mut |_| {})?;

    let asked = Rc::new(Cell::new(0));
    let counter = asked.clone();
    let mut first = trainer(settings.clone())?.stop_when(move || {
        counter.set(counter.get() + 1);
        counter.get() == 5
    });
    assert_eq!(first.resume()?, None);
    let finished = first.run(&mut Points::new(&mesh()), None, &mut |_| {})?;
    assert_eq!((finished, first.steps_done()), (Finished::Stopped, 5));

    let mut second = trainer(settings.clone())?;
    assert_eq!(second.resume()?, Some(root.join("step-5")));
    assert_eq!(second.consumed(), 5 * BATCH);
    let finished = second.run(&mut Points::new(&mesh()), None, &mut |_| {})?;
    assert_eq!(finished, Finished::Done);
    assert_eq!(values(&second), values(&whole));
    let averages = |t: &Trainer<Line>| -> Vec<Vec<f32>> {
        let values = &t.ema().expect("kept").values;
        values
            .values()
            .map(|t| t.to_vec::<f32>().expect("on the host"))
            .collect()
    };
    assert_eq!(averages(&second), averages(&whole));

    // A run that is done already does nothing, and a run without averages reads this one.
    let mut third = trainer(Settings {
        ema: None,
        ..settings
    })?;
    third.resume()?;
    third.run(&mut Points::new(&mesh()), None, &mut |_| {
        panic!("nothing happens")
    })?;
    assert_eq!(third.steps_done(), 12);
    std::fs::remove_dir_all(&root).ok();
    Ok(())
}

#[test]
fn checkpoints_come_when_told_and_the_best_one_stays() -> Result<()> {
    let root = folder("rotate");
    let settings = Settings {
        steps: 20,
        evaluate: Evaluate {
            every: 5,
            batches: 1,
        },
        save: Save {
            folder: Some(root.clone()),
            every_steps: 2,
            keep: 1,
            keep_every: 8,
            best: true,
            bytes_per_step: 1,
            ..Save::default()
        },
        ..Settings::default()
    };
    let mut trainer = trainer(settings)?;
    // Learning makes it worse: only the first evaluation is the best.
    let mut other = Points::new(&mesh());
    let mut best = vec![];
    trainer.task.noise = Some(0.5);
    let watch = &mut |event: &Event<'_>| {
        if let Event::Evaluated {
            step, best: true, ..
        } = event
        {
            best.push(*step);
        }
    };
    trainer.run(&mut Points::new(&mesh()), Some(&mut other), watch)?;
    let mut left: Vec<String> = std::fs::read_dir(&root)
        .expect("made")
        .map(|entry| entry.expect("read").file_name().to_string_lossy().into())
        .filter(|name: &String| name.starts_with("step-"))
        .collect();
    left.sort();
    let mut wanted: Vec<String> = [8, 16, 20].map(|step| format!("step-{step}")).into();
    let kept = format!("step-{}", best.last().expect("one is"));
    if !wanted.contains(&kept) {
        wanted.push(kept);
    }
    wanted.sort();
    assert_eq!(left, wanted);
    std::fs::remove_dir_all(&root).ok();
    Ok(())
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on() -> Result<()> {
    let root = folder("blocked");
    std::fs::write(&root, "a file where the folder should be").expect("written");
    let settings = Settings {
        steps: 6,
        save: Save {
            folder: Some(root.clone()),
            every_steps: 2,
            ..Save::default()
        },
        ..Settings::default()
    };
    let mut trainer = trainer(settings)?;
    let mut failures = vec![];
    let outcome = trainer.run(&mut Points::new(&mesh()), None, &mut |event| {
        if let Event::SaveFailed { step, error } = event {
            failures.push((*step, error.to_string()));
        }
    });
    assert_eq!(trainer.steps_done(), 6);
    assert_eq!(
        failures.iter().map(|(step, _)| *step).collect::<Vec<_>>(),
        [2, 4, 6]
    );
    assert!(
        failures[0].1.contains("anymesh-trainer-blocked"),
        "{failures:?}"
    );
    assert!(outcome.is_err(), "what is lost at the end is an error");
    std::fs::remove_file(&root).ok();
    Ok(())
}

#[test]
fn data_that_ends_ends_the_run() -> Result<()> {
    let mut trainer = trainer(Settings::default())?;
    let mut feed = Points::new(&mesh());
    feed.end = 3 * BATCH;
    assert_eq!(
        trainer.run(&mut feed, None, &mut |_| {})?,
        Finished::NoMoreData
    );
    assert_eq!(trainer.steps_done(), 3);
    Ok(())
}
