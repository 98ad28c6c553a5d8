//! Cost models as text, which is a small part of TOML: sections, numbers, names and lists of pairs.

use super::{CostModel, Curve, DeviceModel, Link, Node, presets};
use crate::{DType, Error, Result};
use std::{collections::BTreeMap, fmt::Write};

impl CostModel {
    /// Reads a model: a preset's name, or the path of a file.
    ///
    /// `h100/hdr` is the preset `h100` with the link `hdr` between nodes.
    #[cfg(not(target_family = "wasm"))]
    pub fn named(name: &str) -> Result<Self> {
        let path = std::path::Path::new(name);
        if path.extension().is_some() || path.is_file() {
            return Self::from_file(path);
        }
        Self::preset(name)
    }

    /// Reads a file.
    #[cfg(not(target_family = "wasm"))]
    pub fn from_file(path: impl AsRef<std::path::Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| Error::Parse {
            what: "cost model",
            text: path.display().to_string(),
            expected: format!(
                "a file that can be read ({error}), or one of the presets {}",
                presets::names()
            ),
        })?;
        Self::parse(&text)
    }

    /// Reads a model from text. What the text does not say is as in [`CostModel::default`]; a key
    /// that means nothing is an error, which names the line.
    ///
    /// Bytes, seconds, bytes per second and operations per second, without prefixes.
    ///
    /// ```
    /// # use anymesh_core::cost::CostModel;
    /// let text = r#"
    /// name = "two boxes"
    /// overlap = 1.2                 # computing and sending at once: each takes 1.2 times as long
    /// [link]                        # between nodes, and for axes without a section
    /// kind = "hdr"                  # a known link; latency and bandwidth may follow
    /// [node]
    /// ranks = 4
    /// kind = "pcie4"
    /// [axis.pp]                     # the axis pp, wherever it lies
    /// latency = 5e-6
    /// bandwidth = 12.5e9
    /// [device]
    /// memory = 24e9
    /// bandwidth = 936e9
    /// [rates]
    /// bf16 = 71e12
    /// [efficiency]
    /// products = [[1e9, 0.5], [1e11, 0.9]]
    /// "#;
    /// let cost = CostModel::parse(text)?;
    /// assert_eq!(cost, CostModel::parse(&cost.to_text())?);
    /// let error = CostModel::parse("[link]\nlatency = fast").unwrap_err().to_string();
    /// assert!(error.starts_with("cannot read 'line 2: latency = fast'"), "{error}");
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self> {
        let mut cost = Self::default();
        let (mut section, mut seen) = (String::new(), BTreeMap::new());
        let mut number = 0;
        for line in text.lines() {
            number += 1;
            let line = Line {
                number,
                text: without_comment(line),
            };
            if line.text.is_empty() {
                continue;
            }
            let name = if line.text.starts_with('[') {
                section = cost.open(&line)?;
                format!("[{section}]")
            } else {
                let (key, value) = line
                    .text
                    .split_once('=')
                    .ok_or_else(|| line.error("`key = value`, `[section]` or a comment after #"))?;
                let (key, value) = (key.trim(), value.trim());
                cost.set(&section, key, &line, value)?;
                format!("{section}.{key}")
            };
            if let Some(first) = seen.insert(name, number) {
                return Err(line.error(format!("each once, this is in line {first} already")));
            }
        }
        cost.check().map_err(|error| Error::Parse {
            what: "cost model",
            text: format!("lines 1 to {number}"),
            expected: error.to_string(),
        })?;
        Ok(cost)
    }

    /// Starts a section; its name.
    fn open(&mut self, line: &Line) -> Result<String> {
        let expected = "[link], [node], [axis.NAME], [device], [rates] or [efficiency]";
        let name = line
            .text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .map(str::trim)
            .ok_or_else(|| line.error(expected))?;
        match name {
            "link" | "device" | "efficiency" => {}
            "rates" => self.device.rates.clear(),
            "node" => {
                self.node = Some(Node {
                    ranks: 1,
                    link: self.link,
                });
            }
            _ => {
                let axis = name
                    .strip_prefix("axis.")
                    .filter(|axis| crate::mesh::is_axis_name(axis))
                    .ok_or_else(|| line.error(expected))?;
                self.axes.insert(axis.into(), self.link);
            }
        }
        Ok(name.into())
    }

    fn set(&mut self, section: &str, key: &str, line: &Line, value: &str) -> Result<()> {
        let axis = section.strip_prefix("axis.");
        let link = match (section, &mut self.node) {
            ("link", _) => Some(&mut self.link),
            ("node", Some(node)) if key != "ranks" => Some(&mut node.link),
            _ => axis.and_then(|axis| self.axes.get_mut(axis)),
        };
        if let Some(link) = link {
            match key {
                "kind" => {
                    *link = presets::link_named(line.name(value)?)
                        .map_err(|error| line.error(error.to_string()))?
                }
                "latency" => link.latency = line.time(value)?,
                "bandwidth" => link.bandwidth = line.positive(value)?,
                _ => return Err(line.unknown(section, &["kind", "latency", "bandwidth"])),
            }
            return Ok(());
        }
        let device = &mut self.device;
        match (section, key) {
            ("", "name") => self.name = line.name(value)?.into(),
            ("", "start") => self.start = line.time(value)?,
            ("", "overlap") => {
                self.overlap = line.number(value)?;
                if !(1.0..=2.0).contains(&self.overlap) {
                    return Err(line.error("1 (for nothing) to 2 (nothing gained)"));
                }
            }
            ("", "reshard_memory") => self.memory = Some(line.bytes(value)?),
            ("node", _) => {
                let ranks = usize::try_from(line.bytes(value)?).ok().filter(|n| *n > 0);
                let ranks = ranks.ok_or_else(|| line.error("at least one rank"))?;
                if let Some(node) = &mut self.node {
                    node.ranks = ranks;
                }
            }
            ("device", "memory") => device.memory = Some(line.bytes(value)?),
            ("device", "bandwidth") => device.bandwidth = line.positive(value)?,
            ("device", "launch") => device.launch = line.time(value)?,
            ("rates", _) => {
                let dtype: DType = key
                    .parse()
                    .map_err(|error: Error| line.error(error.to_string()))?;
                device.rates.insert(dtype, line.positive(value)?);
            }
            ("efficiency", "products") => device.products = line.curve(value)?,
            ("efficiency", "touches") => device.touches = line.curve(value)?,
            ("efficiency", "transfers") => self.transfers = line.curve(value)?,
            _ => {
                let known: &[&str] = match section {
                    "device" => &["memory", "bandwidth", "launch"],
                    "efficiency" => &["products", "touches", "transfers"],
                    _ => &["name", "start", "overlap", "reshard_memory"],
                };
                return Err(line.unknown(section, known));
            }
        }
        Ok(())
    }

    /// The model as text that [`parse`](Self::parse) reads back to the same.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let link = |l: &Link| format!("latency = {:e}\nbandwidth = {:e}\n", l.latency, l.bandwidth);
        let quoted = self.name.replace(['"', '\n', '\r'], "'");
        let DeviceModel {
            memory,
            bandwidth,
            launch,
            rates,
            products,
            touches,
        } = &self.device;
        text += "# Bytes, seconds, bytes per second, operations per second.\n";
        _ = writeln!(text, "name = \"{quoted}\"");
        _ = writeln!(text, "# To begin a step that communicates.");
        _ = writeln!(text, "start = {:e}", self.start);
        _ = writeln!(
            text,
            "# How much longer computing and communicating take while both run: 1 to 2.\noverlap = {:?}",
            self.overlap
        );
        if let Some(bytes) = self.memory {
            _ = writeln!(text, "reshard_memory = {bytes}");
        }
        _ = write!(text, "\n[link]\n{}", link(&self.link));
        if let Some(node) = &self.node {
            _ = write!(
                text,
                "\n[node]\nranks = {}\n{}",
                node.ranks,
                link(&node.link)
            );
        }
        for (axis, l) in &self.axes {
            _ = write!(text, "\n[axis.{axis}]\n{}", link(l));
        }
        text += "\n[device]\n";
        if let Some(bytes) = memory {
            _ = writeln!(text, "memory = {bytes}");
        }
        _ = writeln!(text, "bandwidth = {bandwidth:e}\nlaunch = {launch:e}");
        text += "\n# Operations per second of products at best.\n[rates]\n";
        for (dtype, rate) in rates {
            _ = writeln!(text, "{dtype} = {rate:e}");
        }
        text +=
            "\n# The fraction of the rate, by operations of a product or by bytes.\n[efficiency]\n";
        for (key, curve) in [
            ("products", products),
            ("touches", touches),
            ("transfers", &self.transfers),
        ] {
            let points: Vec<String> = curve
                .points()
                .iter()
                .map(|(amount, fraction)| format!("[{amount:e}, {fraction:?}]"))
                .collect();
            if !points.is_empty() {
                _ = writeln!(text, "{key} = [{}]", points.join(", "));
            }
        }
        text
    }
}

fn without_comment(line: &str) -> &str {
    let mut quoted = false;
    let end = line.find(|c| {
        quoted ^= c == '"';
        c == '#' && !quoted
    });
    line[..end.unwrap_or(line.len())].trim()
}

/// A line without its comment.
struct Line<'a> {
    number: usize,
    text: &'a str,
}

impl<'a> Line<'a> {
    fn error(&self, expected: impl Into<String>) -> Error {
        Error::Parse {
            what: "cost model",
            text: format!("line {}: {}", self.number, self.text),
            expected: expected.into(),
        }
    }

    fn unknown(&self, section: &str, known: &[&str]) -> Error {
        let place = match section {
            "" => "before the first section".into(),
            section => format!("in [{section}]"),
        };
        self.error(format!("one of {} {place}", known.join(", ")))
    }

    fn name(&self, value: &'a str) -> Result<&'a str> {
        value
            .strip_prefix('"')
            .and_then(|rest| rest.strip_suffix('"'))
            .ok_or_else(|| self.error("a name in double quotes"))
    }

    fn number(&self, value: &str) -> Result<f64> {
        value
            .parse()
            .ok()
            .filter(|n: &f64| !n.is_nan())
            .ok_or_else(|| self.error("a number such as 450e9"))
    }

    fn positive(&self, value: &str) -> Result<f64> {
        let n = self.number(value)?;
        if n > 0.0 {
            return Ok(n);
        }
        Err(self.error("a number above 0"))
    }

    fn time(&self, value: &str) -> Result<f64> {
        let n = self.number(value)?;
        if n >= 0.0 && n.is_finite() {
            return Ok(n);
        }
        Err(self.error("seconds, finite and not negative"))
    }

    /// A whole number, which may be written with an exponent.
    fn bytes(&self, value: &str) -> Result<u64> {
        if let Ok(n) = value.parse() {
            return Ok(n);
        }
        let n = self.number(value)?;
        if n >= 0.0 && n < 2f64.powi(63) && n.fract() == 0.0 {
            return Ok(n as u64);
        }
        Err(self.error("a whole number"))
    }

    fn curve(&self, value: &str) -> Result<Curve> {
        let pairs: Vec<[f64; 2]> = serde_json::from_str(value).map_err(|_| {
            self.error("pairs of amount and fraction such as [[1e6, 0.5], [1e8, 0.8]]")
        })?;
        Curve::new(
            pairs
                .into_iter()
                .map(|[amount, fraction]| (amount, fraction)),
        )
        .map_err(|error| self.error(error.to_string()))
    }
}
