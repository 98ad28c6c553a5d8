//! Common machines, as files that say where their numbers come from.

use super::{CostModel, Link};
use crate::{Error, Result};

/// Machines by name: each is a node of eight devices and the usual network between nodes.
pub const PRESETS: [(&str, &str); 6] = [
    ("a100-40", include_str!("presets/a100-40.toml")),
    ("a100-80", include_str!("presets/a100-80.toml")),
    ("h100", include_str!("presets/h100.toml")),
    ("h200", include_str!("presets/h200.toml")),
    ("b200", include_str!("presets/b200.toml")),
    ("mi300x", include_str!("presets/mi300x.toml")),
];

/// Links by name. Bandwidths are one direction of what a data sheet gives for both; latencies of a
/// hop are not in data sheets: 1 us within and 2 us between nodes is what Calculon assumes
/// (calculon-ai/calculon, `systems/`), the other two are assumed by the same measure.
pub const LINKS: [(&str, Link); 9] = [
    // NVIDIA A100: NVLink 600 GB/s.
    ("nvlink3", link(1e-6, 300e9)),
    // NVIDIA H100, H200: NVLink 900 GB/s.
    ("nvlink4", link(1e-6, 450e9)),
    // NVIDIA B200: NVLink 1.8 TB/s.
    ("nvlink5", link(1e-6, 900e9)),
    // AMD MI300X: seven Infinity Fabric links of 128 GB/s.
    ("infinity-fabric", link(1e-6, 448e9)),
    // PCI Express, 16 lanes of 16 and of 32 GT/s, 128b/130b.
    ("pcie4", link(2e-6, 31.5e9)),
    ("pcie5", link(2e-6, 63e9)),
    // InfiniBand, four lanes: 200 and 400 Gb/s for each device.
    ("hdr", link(2e-6, 25e9)),
    ("ndr", link(2e-6, 50e9)),
    // Ethernet of 100 Gb/s for each device.
    ("ethernet-100g", link(10e-6, 12.5e9)),
];

const fn link(latency: f64, bandwidth: f64) -> Link {
    Link { latency, bandwidth }
}

pub(super) fn names() -> String {
    PRESETS.map(|(name, _)| name).join(", ")
}

/// A link by name.
pub(super) fn link_named(name: &str) -> Result<Link> {
    let found = LINKS.iter().find(|(n, _)| *n == name);
    found.map(|(_, link)| *link).ok_or_else(|| Error::Parse {
        what: "link",
        text: name.into(),
        expected: format!("one of {}", LINKS.map(|(name, _)| name).join(", ")),
    })
}

impl CostModel {
    /// A common machine: one of [`PRESETS`]; `h100/hdr` has another [link](LINKS) between nodes.
    ///
    /// Rates are those of the vendor's data sheet, dense; how much of them a step reaches is fitted
    /// to published iteration times, see the files. For more than a comparison of layouts, measure:
    /// `anymesh doctor --measure`.
    pub fn preset(name: &str) -> Result<Self> {
        let (machine, network) = match name.split_once('/') {
            Some((machine, network)) => (machine, Some(network)),
            None => (name, None),
        };
        let (_, text) = PRESETS
            .iter()
            .find(|(n, _)| *n == machine)
            .ok_or_else(|| Error::Parse {
                what: "cost model",
                text: name.into(),
                expected: format!(
                    "one of the presets {}, with another link between nodes as in h100/hdr, or a file such as cost.toml",
                    names()
                ),
            })?;
        let mut cost = Self::parse(text)?;
        if let Some(network) = network {
            cost.link = link_named(network)?;
            cost.name = name.into();
        }
        Ok(cost)
    }
}
