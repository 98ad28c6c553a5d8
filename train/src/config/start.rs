//! From a configuration to a trainer that can run.

use super::{DataConfig, ModelChoice, RunConfig, print};
use crate::{
    BatchSize, Build, Error, Lora, Module, Policy, Result, add_lora,
    data::{
        Concat, Each, Field, Form, Loader, LoaderOptions, Megatron, Mixture, Source, TokenFile,
        TokenType, Tokenized, Tokenizer, open_records, tokenize_once,
    },
    models::{Model, ModelFiles},
    objective::Language,
    optim::{Groups, LossScaler, Optimizer},
    pipeline::{ScheduleChoice, Stages},
    trainer::{FromLoader, LanguageModel, Trainer},
};
use anymesh_checkpoint::Training;
use anymesh_core::{DType, Mesh};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A run that is ready to go.
#[derive(Debug)]
pub struct Prepared {
    /// The trainer, at its beginning.
    pub trainer: Trainer<LanguageModel>,
    /// What it is trained on.
    pub feed: FromLoader,
    /// What it is evaluated on.
    pub evaluation: Option<FromLoader>,
    /// Between text and tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// The sizes of batches.
    pub batch: BatchSize,
    /// Samples that there are in one epoch.
    pub samples: u64,
}

impl RunConfig {
    /// Builds or loads the model, opens the data and makes the optimizer, on a mesh. Everything
    /// that a configuration can have wrong is found here, before the first step.
    pub fn prepare(&self, mesh: &Mesh) -> Result<Prepared> {
        let (stages, schedule) = self.stages(mesh)?;
        let mut build = self.build(mesh, stages)?;
        let (mut model, mut tokenizer) = match self.model_choice()? {
            ModelChoice::New(config) => {
                build = self.with_measured_costs(&config, build)?;
                (config.build(&build)?, None)
            }
            ModelChoice::Trained(path) => {
                let files = ModelFiles::open(&path)?;
                build = self.with_measured_costs(&files.config()?, build)?;
                let tokenizer = match files.text("tokenizer.json")? {
                    Some(json) => Some(Tokenizer::from_json(json.as_bytes(), &path)?),
                    None => None,
                };
                (files.load(&build)?, tokenizer)
            }
        };
        if let Some(name) = &self.tokenizer {
            tokenizer = Some(self.tokenizer(name, mesh)?);
        }
        let tokenizer = Arc::new(tokenizer.unwrap_or_else(Tokenizer::bytes));
        self.check_model(&model, &tokenizer)?;
        self.equip(&mut model)?;

        let ranks = |name: &str| mesh.axis(name).map_or(1, |axis| mesh.size(axis));
        // Experts are spread over ranks that each have data of their own.
        let dp = ranks("dp") * ranks("ep");
        let batch = self.batch.spec(dp as u64).solve()?;
        let vocabulary = model.config().vocabulary();
        let data = self.mixture("data", &self.data, &tokenizer, vocabulary, mesh)?;
        let samples = data.count();
        let options = LoaderOptions {
            batch: batch.global as usize,
            micro_batches: batch.accumulation as usize,
            seed: self.run.seed,
            order: model.order(self.batch.length)?,
            pad: tokenizer.special().pad.unwrap_or(0),
            ..LoaderOptions::default()
        };
        let feed = FromLoader::new(Loader::new(data, mesh, options.clone())?);
        let evaluation = match self.evaluation.is_empty() {
            true => None,
            false => {
                let data =
                    self.mixture("evaluation", &self.evaluation, &tokenizer, vocabulary, mesh)?;
                Some(FromLoader::new(Loader::evaluation(data, mesh, options)?))
            }
        };
        if self.run.evaluate.every > 0 && evaluation.is_none() {
            let detail = "there is nothing to evaluate on: give [[evaluation]] with a path";
            return Err(Error::config("run.evaluate.every", detail));
        }

        if let Some(folder) = self.run.save.folder.as_ref().filter(|_| mesh.is_first()) {
            tokenizer.save(folder)?; // whoever runs a checkpoint finds it there
        }

        let policy = build.policy();
        let optimizer = self.optimizer(&model, policy)?;
        self.schedule.check("schedule")?;
        let about = self.about(&model)?;
        let task = self.task(model, policy, schedule);
        task.check_schedule(batch.accumulation as usize, self.pipeline.memory)?;
        let mut trainer = Trainer::new(task, optimizer, self.schedule.clone(), self.run.clone())?;
        trainer.about = about;
        Ok(Prepared {
            trainer,
            feed,
            evaluation,
            tokenizer,
            batch,
            samples,
        })
    }

    /// The stages of the model on a mesh, and what is done when.
    pub(crate) fn stages(&self, mesh: &Mesh) -> Result<(Stages, ScheduleChoice)> {
        let ranks = mesh.axis("pp").map_or(1, |axis| mesh.size(axis));
        self.pipeline.choose(ranks)
    }

    /// What the model is built with.
    pub(crate) fn build(&self, mesh: &Mesh, stages: Stages) -> Result<Build> {
        Ok(Build::new(mesh, self.mesh.policy()?, self.run.seed)
            .zero(self.mesh.stage()?, &["dp", "ep", "cp"])
            .sequence_parallel(self.mesh.sequence_parallel)
            .long_sequences(self.context)
            .stages(stages))
    }

    /// Gives a model what the run has besides: recomputing, frozen parameters, adapters.
    pub(crate) fn equip(&self, model: &mut Model) -> Result<()> {
        model.set_recompute(self.mesh.recompute);
        if let Some(pattern) = &self.freeze {
            model.freeze(pattern)?;
        }
        if let Some(lora) = &self.lora {
            let settings = Lora {
                rank: lora.rank,
                alpha: lora.alpha,
                dropout: lora.dropout,
                seed: self.run.seed,
            };
            add_lora(model, &lora.of, &settings)?;
        }
        Ok(())
    }

    /// The optimizer of the model's parameters.
    pub(crate) fn optimizer(&self, model: &Model, policy: Policy) -> Result<Optimizer> {
        let mut optimizer = Optimizer::new(model, &self.groups())?;
        optimizer.clip = Some(self.clip.clone());
        if policy.compute == DType::F16 {
            optimizer.scaler = Some(LossScaler::default());
        }
        Ok(optimizer)
    }

    /// The model with its loss.
    pub(crate) fn task(
        &self,
        model: Model,
        policy: Policy,
        schedule: ScheduleChoice,
    ) -> LanguageModel {
        let language = Language {
            output: policy.output,
            ..Language::default()
        };
        let mut task = LanguageModel::new(model, language, self.batch.length);
        task.mix_documents = self.batch.mix_documents;
        task.schedule = schedule;
        task
    }

    /// The tokenizer by its name. One that is learnt from the data is kept beside the checkpoints, so
    /// that a run that goes on has the same one.
    fn tokenizer(&self, name: &str, mesh: &Mesh) -> Result<Tokenizer> {
        let Some(size) = name.strip_prefix("bpe:") else {
            return match name {
                "bytes" => Ok(Tokenizer::bytes()),
                path => Tokenizer::open(path),
            };
        };
        let Ok(size) = size.parse() else {
            let detail = format!("'{size}' is no number of tokens: bpe:2048");
            return Err(Error::config("tokenizer", detail));
        };
        let kept = self.cache().join(format!("bpe-{size}"));
        let mut learnt = Ok(());
        if mesh.is_first() && !kept.join("tokenizer.json").exists() {
            learnt = self.learn_tokenizer(size).and_then(|t| t.save(&kept));
        }
        crate::trainer::wait_for_all(mesh)?;
        learnt?;
        Tokenizer::open(&kept)
    }

    fn learn_tokenizer(&self, size: usize) -> Result<Tokenizer> {
        let mut texts = vec![];
        for part in &self.data {
            let records = open_records(&part.path)?;
            for index in 0..records.count() {
                let fields = records.fields(index, &[&part.field])?;
                texts.extend(fields.into_iter().filter_map(|field| match field {
                    Field::Text(text) => Some(text),
                    Field::Number(_) => None,
                }));
            }
        }
        Tokenizer::train_bpe(texts, size)
    }

    fn check_model(&self, model: &Model, tokenizer: &Tokenizer) -> Result<()> {
        let config = model.config();
        if tokenizer.vocabulary() > config.vocabulary() {
            let detail = format!(
                "the tokenizer has {} tokens and the model {}: set model.vocab_size, or take the model's tokenizer",
                tokenizer.vocabulary(),
                config.vocabulary()
            );
            return Err(Error::config("tokenizer", detail));
        }
        if self.batch.length > config.longest() {
            let detail = format!(
                "{} tokens are more than the model can tell apart, {}",
                self.batch.length,
                config.longest()
            );
            return Err(Error::config("batch.length", detail));
        }
        if matches!(model, Model::Bert(_)) {
            let detail = "an encoder predicts no next token: gpt2, llama, mistral, qwen2, mixtral and qwen3_moe do";
            return Err(Error::config("model.model_type", detail));
        }
        Ok(())
    }

    /// The groups of the configuration, and one for all other parameters where any are left.
    fn groups(&self) -> Groups {
        let mut groups = Groups {
            groups: self.groups.clone(),
        };
        if !self.groups.iter().any(|group| group.of.trim() == "*") {
            groups = groups.of("*", self.optimizer.clone());
        }
        groups
    }

    /// What checkpoints tell of the model, so that they can be exported and run again.
    fn about(&self, model: &Model) -> Result<Training> {
        let mut config = model.config().to_settings()?;
        let class = config.remove("architectures");
        let class = class.as_ref().and_then(|list| list.get(0));
        let mut about = Training {
            architecture: class.and_then(|name| name.as_str()).map(String::from),
            config: Some(config),
            ..Training::default()
        };
        about.more.insert("run".into(), print(self)?.into());
        Ok(about)
    }

    fn mixture(
        &self,
        key: &str,
        parts: &[DataConfig],
        tokenizer: &Arc<Tokenizer>,
        vocabulary: usize,
        mesh: &Mesh,
    ) -> Result<Mixture> {
        if parts.is_empty() {
            return Err(Error::config(key, "there is none: give a path"));
        }
        let mut sources = vec![];
        for part in parts {
            sources.push((self.source(part, tokenizer, vocabulary, mesh)?, part.weight));
        }
        Mixture::new(sources)
    }

    fn source(
        &self,
        part: &DataConfig,
        tokenizer: &Arc<Tokenizer>,
        vocabulary: usize,
        mesh: &Mesh,
    ) -> Result<Arc<dyn Source>> {
        let (path, length) = (&part.path, self.batch.length);
        if path.extension().is_some_and(|e| e == "bin" || e == "idx") {
            return Ok(match path.with_extension("idx").exists() {
                true => Arc::new(Concat::new(Megatron::open(path, vocabulary)?, length)?),
                false => {
                    let ty = TokenType::for_vocabulary(vocabulary);
                    let tokens = TokenFile::open(path, ty, vocabulary)?;
                    Arc::new(Concat::new(tokens, length)?)
                }
            });
        }
        let records = open_records(path)?;
        if let Some(prompt) = &part.prompt {
            let form = Form::Completion {
                prompt: prompt.clone(),
                completion: part.field.clone(),
            };
            let documents = Tokenized::new(records, tokenizer.clone(), form);
            return Ok(Arc::new(Each::new(documents, length)?));
        }
        let form = Form::Text(part.field.clone());
        let documents = Tokenized::new(records, tokenizer.clone(), form);
        let folder = self.cache();
        // One process writes the tokens, the others wait and then find them.
        let mut made = Ok(());
        if mesh.is_first() {
            made = tokenize_once(&documents, &folder, vocabulary, &mut |_, _| {}).map(|_| ());
        }
        crate::trainer::wait_for_all(mesh)?;
        made?;
        let tokens = tokenize_once(&documents, &folder, vocabulary, &mut |_, _| {})?;
        Ok(Arc::new(Concat::new(tokens, length)?))
    }

    /// Where tokens of texts are kept: beside the checkpoints, or in the system's temporary folder.
    fn cache(&self) -> PathBuf {
        match &self.run.save.folder {
            Some(folder) => folder.join("tokens"),
            None => Path::new(&std::env::temp_dir()).join("anymesh-tokens"),
        }
    }
}
