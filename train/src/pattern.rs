//! Which parameters are meant: names with `*`.

use crate::{Error, Result};
use anymesh_checkpoint::matches;
use std::fmt;

/// Patterns of names, separated by commas, in which `*` stands for any characters. A name is meant
/// if one of them fits.
///
/// ```
/// # use anymesh_train::Pattern;
/// let no_decay: Pattern = "*norm*, *.bias".parse()?;
/// assert!(no_decay.fits("model.norm.weight") && no_decay.fits("fc.bias"));
/// assert!(!no_decay.fits("fc.weight"));
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(Vec<String>);

impl Pattern {
    /// Whether a name is meant.
    pub fn fits(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| matches(pattern, name))
    }

    /// That each of the patterns fits at least one of the names: one that fits none is a mistake.
    pub fn check(&self, names: &[String]) -> Result<()> {
        let unmatched = |pattern: &&String| !names.iter().any(|name| matches(pattern, name));
        match self.0.iter().find(unmatched) {
            None => Ok(()),
            Some(pattern) => Err(Error::Pattern {
                pattern: pattern.clone(),
                detail: match names.first() {
                    Some(name) => format!("fits no parameter: names are such as '{name}'"),
                    None => "fits no parameter: there are none".into(),
                },
            }),
        }
    }
}

impl std::str::FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let patterns: Vec<String> = text.split(',').map(|p| p.trim().to_string()).collect();
        if patterns.iter().any(String::is_empty) {
            return Err(Error::Pattern {
                pattern: text.into(),
                detail: "has an empty part: write names with *, separated by commas".into(),
            });
        }
        Ok(Self(patterns))
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}
