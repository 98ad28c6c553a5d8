//! Which rule each parameter follows.

use super::Rule;
use crate::{Error, Module, Pattern, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Parameters that follow one rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The names of its parameters: a [`Pattern`].
    pub of: String,
    /// The rule.
    pub rule: Rule,
    /// What the rule's learning rate is multiplied with.
    #[serde(default = "one")]
    pub rate: f64,
    /// A weight decay in place of the rule's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay: Option<f64>,
}

fn one() -> f64 {
    1.0
}

impl Group {
    /// The rule with what the group changes of it.
    pub fn own_rule(&self) -> Rule {
        let rule = self.rule.clone().with_lr(self.rule.lr() * self.rate);
        match self.decay {
            Some(decay) => rule.with_decay(decay),
            None => rule,
        }
    }
}

/// Groups in order: a parameter is in the first whose pattern fits its name.
///
/// ```
/// # use anymesh_train::optim::{AdamW, Groups, Muon, Rule};
/// let adamw = Rule::AdamW(AdamW { lr: 3e-4, ..AdamW::default() });
/// let groups = Groups::default()
///     .of("*norm*, *.bias", adamw.clone().with_decay(0.0))
///     .of("*embed*", adamw)
///     .of("*", Rule::Muon(Muon::default()));
/// let text = toml::to_string(&groups)?;
/// assert!(text.starts_with("[[groups]]\nof = \"*norm*, *.bias\""));
/// assert_eq!(toml::from_str::<Groups>(&text)?, groups);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Groups {
    /// The groups.
    pub groups: Vec<Group>,
}

impl Groups {
    /// One rule for all parameters.
    pub fn all(rule: Rule) -> Self {
        Self::default().of("*", rule)
    }

    /// With another group after the others.
    pub fn of(mut self, names: &str, rule: Rule) -> Self {
        self.groups.push(Group {
            of: names.into(),
            rule,
            rate: 1.0,
            decay: None,
        });
        self
    }

    /// The group of every trainable parameter of a model, by its position.
    ///
    /// Errors where a parameter is in no group, a pattern fits none, a group is left without
    /// parameters by those before it, or settings make no sense.
    pub fn assign(&self, model: &(impl Module + ?Sized)) -> Result<BTreeMap<String, usize>> {
        let names = model.names();
        let mut patterns: Vec<Pattern> = Vec::with_capacity(self.groups.len());
        for (i, group) in self.groups.iter().enumerate() {
            let key = format!("groups[{i}]");
            group.rule.check(&format!("{key}.rule"))?;
            if !(group.rate.is_finite() && group.rate >= 0.0) {
                let detail = format!("{} is not a number from 0", group.rate);
                return Err(Error::config(format!("{key}.rate"), detail));
            }
            if let Some(decay) = group.decay.filter(|d| !(d.is_finite() && *d >= 0.0)) {
                let detail = format!("{decay} is not a number from 0");
                return Err(Error::config(format!("{key}.decay"), detail));
            }
            let pattern: Pattern = group.of.parse()?;
            pattern.check(&names)?;
            patterns.push(pattern);
        }
        let (mut found, mut taken) = (BTreeMap::new(), vec![false; patterns.len()]);
        let mut lost = None;
        model.visit(
            "",
            &mut |name, p| match patterns.iter().position(|pattern| pattern.fits(name)) {
                Some(group) => {
                    taken[group] = true;
                    if p.is_trainable() {
                        found.insert(name.to_string(), group);
                    }
                }
                None if p.is_trainable() && lost.is_none() => lost = Some(name.to_string()),
                None => {}
            },
        );
        if let Some(name) = lost {
            let detail = "it is in no group: add one whose pattern fits it, such as '*' at the end";
            return Err(Error::parameter(name, detail));
        }
        match taken.iter().position(|taken| !taken) {
            None => Ok(found),
            Some(group) => Err(Error::Pattern {
                pattern: self.groups[group].of.clone(),
                detail: "is left without parameters: all that it fits are in groups before it, \
                         so put it in front of them"
                    .into(),
            }),
        }
    }
}
