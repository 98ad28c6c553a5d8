//! Rotary frequencies that are stretched for longer texts.

use crate::{Error, Result, nn::Rope};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::f64::consts::TAU;

/// How the frequencies of a longer model follow from those of a shorter one (`rope_scaling`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// All divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Low ones divided by a factor, high ones kept, those between interpolated: Llama 3.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Waves longer than the original length by this are low.
        low_freq_factor: f64,
        /// Waves shorter than the original length by this are high.
        high_freq_factor: f64,
        /// The length of texts that the model was first trained with.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// From the setting `rope_scaling`, or what `rope_parameters` has besides its base.
    pub(super) fn of(value: &Value) -> Result<Option<Self>> {
        let Value::Object(given) = value else {
            return match value.is_null() {
                true => Ok(None),
                false => Err(Error::config("rope_scaling", "it is not an object")),
            };
        };
        let mut settings = given.clone();
        // Its name before transformers 4.43; configurations may have both.
        let before = settings.remove("type");
        settings.remove("rope_theta");
        let kind = settings.get("rope_type").or(before.as_ref());
        let kind = kind
            .and_then(Value::as_str)
            .unwrap_or("default")
            .to_string();
        if kind == "default" {
            return Ok(None);
        }
        if kind != "linear" && kind != "llama3" {
            return Err(Error::config(
                "rope_scaling.rope_type",
                format!("'{kind}' is not supported: linear and llama3 are"),
            ));
        }
        settings.insert("rope_type".into(), kind.into());
        let scaling: Self = serde_json::from_value(Value::Object(settings))
            .map_err(|e| Error::config("rope_scaling", e.to_string()))?;
        scaling.check()?;
        Ok(Some(scaling))
    }

    /// That its numbers make sense.
    pub(super) fn check(&self) -> Result<()> {
        let above = |key: &str, x: f64| match x > 0.0 && x.is_finite() {
            true => Ok(()),
            false => Err(Error::config(
                format!("rope_scaling.{key}"),
                format!("{x} is not above zero"),
            )),
        };
        match self {
            Self::Linear { factor } => above("factor", *factor),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                above("factor", *factor)?;
                above("low_freq_factor", *low)?;
                above("original_max_position_embeddings", *original as f64)?;
                match high > low {
                    true => Ok(()),
                    false => Err(Error::config(
                        "rope_scaling.high_freq_factor",
                        format!("{high} is not above low_freq_factor, {low}"),
                    )),
                }
            }
        }
    }

    /// A frequency as the longer model has it.
    fn stretch(&self, frequency: f64) -> f64 {
        match *self {
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                // How many waves the original length has.
                let waves = original as f64 * frequency / TAU;
                let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
                frequency / factor * (1.0 - kept) + frequency * kept
            }
        }
    }
}

/// The frequencies of a head.
pub(super) fn frequencies(
    size: usize,
    base: f64,
    scaling: Option<&RopeScaling>,
) -> Result<Vec<f64>> {
    let plain = Rope::frequencies(size, base)?;
    Ok(match scaling {
        None => plain,
        Some(scaling) => plain.into_iter().map(|f| scaling.stretch(f)).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn llama_3_keeps_short_waves_and_stretches_long_ones() -> Result<()> {
        let scaling = RopeScaling::of(&json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
        }))?;
        let f = frequencies(128, 500_000.0, scaling.as_ref())?;
        let plain = frequencies(128, 500_000.0, None)?;
        assert_eq!(f[0], 1.0);
        assert_eq!(f[63], plain[63] / 8.0);
        let between = (0..64).filter(|i| f[*i] != plain[*i] && f[*i] != plain[*i] / 8.0);
        for i in between {
            let wave = TAU / plain[i];
            assert!(wave > 2048.0 && wave < 8192.0, "{i}: {wave}");
            let smooth = (8192.0 / wave - 1.0) / 3.0;
            let expected = (1.0 - smooth) * plain[i] / 8.0 + smooth * plain[i];
            assert!((f[i] - expected).abs() < 1e-15);
        }
        Ok(())
    }

    #[test]
    fn scalings_that_are_not_known_are_named() {
        let error = RopeScaling::of(&json!({"type": "yarn", "factor": 4.0, "beta_fast": 32}));
        let text = error.expect_err("yarn").to_string();
        assert!(text.starts_with("rope_scaling.rope_type: 'yarn'"), "{text}");
        let error = RopeScaling::of(&json!({"rope_type": "linear"}));
        let text = error.expect_err("no factor").to_string();
        assert!(text.contains("factor"), "{text}");
        for none in [
            json!(null),
            json!({"rope_type": "default", "rope_theta": 1e4}),
        ] {
            assert_eq!(RopeScaling::of(&none).expect("none"), None);
        }
    }
}
