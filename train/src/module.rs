//! Models: structs of parameters that are known by name.

use crate::{Error, Param, Pattern, Result};
use anymesh_checkpoint::{Contents, Load, Loaded, Source};
use anymesh_core::Tensor;
use std::collections::BTreeMap;

/// Something that has parameters. Derive it: `#[derive(Module)]` visits the fields by their names,
/// and everything else is a function over that.
///
/// ```
/// # use anymesh_train::{Build, Init, Module, Policy, nn::Linear};
/// #[derive(Module)]
/// struct Mlp {
///     up: Linear,
///     #[name = "out_proj"]
///     down: Option<Linear>,
/// }
/// # let device = anymesh_backend_cpu::device();
/// let b = Build::new(&device, Policy::f32(), 1);
/// let mut mlp = Mlp {
///     up: Linear::new(&b.at("up"), [4, 8], "[_, _]", Init::Normal(0.02))?,
///     down: Some(Linear::new(&b.at("out_proj"), [8, 4], "[_, _]", Init::Normal(0.02))?),
/// };
/// assert_eq!(mlp.names(), ["up.weight", "out_proj.weight"]);
/// assert_eq!(mlp.freeze("up.*")?, 1);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub trait Module {
    /// Shows every parameter, with its name below `path`, in a fixed order.
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param));

    /// [`visit`](Self::visit) to change them.
    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param));

    /// Names that files may have for a parameter of another name: `(lm_head.weight,
    /// model.embed_tokens.weight)` where the two are one.
    fn tied(&self) -> Vec<(String, String)> {
        vec![]
    }

    /// The names of all parameters.
    fn names(&self) -> Vec<String> {
        let mut names = vec![];
        self.visit("", &mut |name, _| names.push(name.to_string()));
        names
    }

    /// The number of values in all parameters, those that are tied counted once.
    fn count(&self) -> usize {
        let mut count = 0;
        self.visit("", &mut |_, p| count += p.value().numel());
        count
    }

    /// The values of all parameters as they are stored.
    fn values(&self) -> BTreeMap<String, Tensor> {
        let mut values = BTreeMap::new();
        self.visit("", &mut |name, p| {
            values.insert(name.to_string(), p.value().detach());
        });
        values
    }

    /// Gives parameters other values, by name; parameters that are not named keep theirs. A name
    /// that is none of a parameter is an error.
    fn set_values(&mut self, values: &BTreeMap<String, Tensor>) -> Result<()> {
        let mut left: Vec<&String> = values.keys().collect();
        self.try_each(&mut |name, p| {
            if let Some(value) = values.get(name) {
                left.retain(|l| *l != name);
                p.set(value)?;
            }
            Ok(())
        })?;
        match left.first() {
            None => Ok(()),
            Some(name) => Err(Error::parameter(*name, "the model has none of this name")),
        }
    }

    /// [`visit_mut`](Self::visit_mut) until something goes wrong.
    fn try_each(&mut self, f: &mut dyn FnMut(&str, &mut Param) -> Result<()>) -> Result<()> {
        let mut outcome = Ok(());
        self.visit_mut("", &mut |name, p| {
            if outcome.is_ok() {
                outcome = f(name, p);
            }
        });
        outcome
    }

    /// Keeps the parameters of a [`Pattern`] as they are: training leaves them alone, and no
    /// gradient is computed for them. Returns how many there are.
    fn freeze(&mut self, pattern: &str) -> Result<usize> {
        train(self, pattern, false)
    }

    /// Lets training change the parameters of a [`Pattern`] (again).
    fn unfreeze(&mut self, pattern: &str) -> Result<usize> {
        train(self, pattern, true)
    }

    /// Fills all parameters from a file, a folder or a checkpoint, each rank reading what it holds.
    /// Values are rounded to the dtype of the parameters; a tied parameter is found under either of
    /// its names. What `load` does not allow (missing, unexpected or differently shaped tensors) is
    /// an error that names the nearest names.
    fn load(&mut self, source: &dyn Source, mut load: Load<'_>) -> Result<Loaded> {
        let mut wanted = self.values();
        let mut renamed = vec![];
        for (alias, owner) in self.tied() {
            if source.info(&owner).is_err() && source.info(&alias).is_ok() {
                if let Some(value) = wanted.remove(&owner) {
                    wanted.insert(alias.clone(), value);
                    renamed.push((alias, owner));
                }
            } else {
                load.ignore.push(alias);
            }
        }
        load.cast = true;
        let mut loaded = load.replace(source, &Contents::new(0, wanted))?;
        for (alias, owner) in renamed {
            if let Some(value) = loaded.tensors.remove(&alias) {
                loaded.tensors.insert(owner, value);
            }
        }
        self.set_values(&loaded.tensors)?;
        Ok(loaded)
    }
}

fn train<M: Module + ?Sized>(module: &mut M, pattern: &str, trainable: bool) -> Result<usize> {
    let pattern: Pattern = pattern.parse()?;
    pattern.check(&module.names())?;
    let mut count = 0;
    module.try_each(&mut |name, p| {
        if pattern.fits(name) {
            count += 1;
            p.train(trainable)?;
        }
        Ok(())
    })?;
    Ok(count)
}

impl Module for Param {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        f(path, self);
        if let Some(adapter) = &self.adapter {
            adapter.visit(parent(path), f);
        }
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        f(path, self);
        if let Some(adapter) = &mut self.adapter {
            adapter.visit_mut(parent(path), f);
        }
    }
}

/// The path of the layer that a weight is of.
fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(parent, _)| parent)
}

impl<M: Module> Module for Option<M> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        self.iter().for_each(|m| m.visit(path, f));
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        self.iter_mut().for_each(|m| m.visit_mut(path, f));
    }
}

impl<M: Module> Module for Vec<M> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        for (i, m) in self.iter().enumerate() {
            m.visit(&crate::join(path, &i.to_string()), f);
        }
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        for (i, m) in self.iter_mut().enumerate() {
            m.visit_mut(&crate::join(path, &i.to_string()), f);
        }
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        (**self).visit(path, f);
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        (**self).visit_mut(path, f);
    }

    fn tied(&self) -> Vec<(String, String)> {
        (**self).tied()
    }
}
