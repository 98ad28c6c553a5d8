//! A cluster as numbers. **Every coefficient of the simulator is in this file**, and what it was taken
//! from beside it.

use crate::{Error, Result, layout::Precision};
use serde::{Deserialize, Serialize};

/// GPUs in nodes.
///
/// ```
/// let machine = anymesh_simulate::machine("h100")?;
/// assert_eq!(machine.node, 8);
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// What it is called.
    pub name: String,
    /// Operations of a GPU in a second in bf16, as its maker says, without sparsity.
    pub bf16: f64,
    /// The same in fp8; as in bf16 where there is none.
    pub fp8: f64,
    /// Bytes of a GPU's memory.
    pub memory: f64,
    /// Bytes that it reads or writes in a second, as its maker says.
    pub bandwidth: f64,
    /// GPUs of a node.
    pub node: usize,
    /// Between GPUs of a node.
    pub inside: Link,
    /// Between nodes, for each GPU.
    pub between: Link,
    /// What of these numbers is reached.
    pub coefficients: Coefficients,
}

/// What connects a GPU to others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bytes in a second, in one direction.
    pub bandwidth: f64,
    /// Seconds of a message without content.
    pub latency: f64,
}

/// What of a maker's numbers a training step reaches. Shares are between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coefficients {
    /// Share of the peak that a large matrix product reaches.
    pub products: f64,
    /// Share of the peak that a flash attention kernel reaches in a forward pass.
    pub flash: f64,
    /// Share of the memory's bandwidth that element-wise kernels reach.
    pub memory: f64,
    /// Share of the link's bandwidth that collectives inside of a node reach.
    pub inside: f64,
    /// The same between nodes.
    pub between: f64,
    /// Seconds that a product takes besides: its launch, and the time until all cores have work. This
    /// is what makes small products slow.
    pub ramp: f64,
    /// Share of the weight gradients' time behind which tensor parallel collectives of a backward pass
    /// vanish.
    pub tensor_overlap: f64,
    /// Share of a pass behind which data parallel collectives vanish.
    pub data_overlap: f64,
    /// Element-wise traffic of a backward pass, as a multiple of the forward pass's.
    pub backward: f64,
    /// Share of memory that a step may plan with: the rest is for contexts, buffers of collectives and
    /// holes.
    pub usable: f64,
}

/// Fitted by hand, all together, to the eight step times of arXiv 2205.05198 table 5 (22B to 1T, full
/// recompute, and selective with sequence parallel), but for what those runs do not show: `flash`
/// is assumed, about what arXiv 2307.08691 reports; `between`, `data_overlap`, `backward` and `usable`
/// are assumed.
const A100: Coefficients = Coefficients {
    products: 0.76,
    flash: 0.65,
    memory: 0.8,
    inside: 0.7,
    between: 0.6,
    ramp: 1e-5,
    tensor_overlap: 0.0,
    data_overlap: 0.8,
    backward: 1.5,
    usable: 0.94,
};

/// `products` and `flash` are fitted to the 430 and 380 TFLOP/s of arXiv 2407.21783 table 4, first and
/// last row (405B at 8,192 and at 131,072 tokens); the row between is not used. The others are assumed
/// to be the A100's.
const H100: Coefficients = Coefficients {
    products: 0.615,
    flash: 0.57,
    ..A100
};

const GIB: f64 = (1u64 << 30) as f64;

/// The machines that are known by name. Peaks, memories and links are of their makers' data sheets;
/// latencies are assumed.
pub fn machines() -> Vec<Machine> {
    let a100 = Machine {
        name: "a100-80".into(),
        bf16: 312e12,
        fp8: 312e12,
        memory: 80.0 * GIB,
        bandwidth: 2.039e12,
        node: 8,
        // NVLink 3: 600 GB/s in both directions together.
        inside: Link {
            bandwidth: 300e9,
            latency: 5e-6,
        },
        // An InfiniBand HDR adapter for each GPU: 200 Gb/s.
        between: Link {
            bandwidth: 25e9,
            latency: 1e-5,
        },
        coefficients: A100,
    };
    let h100 = Machine {
        name: "h100".into(),
        bf16: 989e12,
        fp8: 1979e12,
        bandwidth: 3.35e12,
        // NVLink 4: 900 GB/s in both directions together.
        inside: Link {
            bandwidth: 450e9,
            latency: 5e-6,
        },
        // 400 Gb/s for each GPU.
        between: Link {
            bandwidth: 50e9,
            latency: 1e-5,
        },
        coefficients: H100,
        ..a100.clone()
    };
    let h200 = Machine {
        name: "h200".into(),
        memory: 141e9,
        bandwidth: 4.8e12,
        ..h100.clone()
    };
    let h800 = Machine {
        name: "h800".into(),
        // 400 GB/s in both directions together.
        inside: Link {
            bandwidth: 200e9,
            latency: 5e-6,
        },
        ..h100.clone()
    };
    vec![a100, h100, h200, h800]
}

/// A machine by its name.
pub fn machine(name: &str) -> Result<Machine> {
    let plain = name.to_lowercase().replace(['-', '_'], "");
    let all = machines();
    let known = all.iter().map(|m| m.name.clone()).collect();
    let short = |m: &Machine| {
        let own = m.name.replace('-', "");
        own == plain
            || plain.strip_prefix(&own) == Some("g")
            || own.strip_suffix("80") == Some(&plain)
    };
    all.into_iter().find(short).ok_or_else(|| Error::Unknown {
        what: "machine",
        name: name.into(),
        known,
    })
}

impl Machine {
    /// Operations of a GPU in a second, as its maker says.
    pub fn peak(&self, precision: Precision) -> f64 {
        match precision {
            Precision::Bf16 => self.bf16,
            Precision::Fp8 => self.fp8,
        }
    }

    /// Seconds of a product of so many operations that touches so many bytes, on a GPU whose peak for
    /// its dtype is `peak` and of which it reaches `share`.
    pub fn product(&self, operations: f64, bytes: f64, peak: f64, share: f64) -> f64 {
        let computes = operations / (peak * share);
        computes.max(self.traffic(bytes)) + self.coefficients.ramp
    }

    /// Seconds of kernels that read and write so many bytes and do little else.
    pub fn traffic(&self, bytes: f64) -> f64 {
        bytes / (self.bandwidth * self.coefficients.memory)
    }

    /// Seconds of a collective of `size` ranks, every `stride`-th one, in which a rank receives so many
    /// bytes. A group that has several ranks in each node uses the adapters of all of them.
    ///
    /// ```
    /// let machine = anymesh_simulate::machine("h100")?;
    /// // Eight ranks of a node, and eight ranks of as many nodes.
    /// assert!(machine.collective(1e9, 1, 8) < machine.collective(1e9, 8, 8));
    /// # Ok::<(), anymesh_simulate::Error>(())
    /// ```
    pub fn collective(&self, bytes: f64, stride: usize, size: usize) -> f64 {
        if size <= 1 {
            return 0.0;
        }
        let c = &self.coefficients;
        let near = self.near(stride, size);
        let inside = self.inside.bandwidth * c.inside;
        let hops = (size as f64).log2().ceil();
        match near >= size {
            true => bytes / inside + self.inside.latency * hops,
            false => {
                let between = self.between.bandwidth * c.between * near as f64;
                bytes / inside.min(between) + self.between.latency * hops
            }
        }
    }

    /// Seconds from one of `size` ranks, every `stride`-th one, to the next.
    pub fn transfer(&self, bytes: f64, stride: usize, size: usize) -> f64 {
        let c = &self.coefficients;
        match size {
            0 | 1 => 0.0,
            _ if self.near(stride, size) >= size => {
                bytes / (self.inside.bandwidth * c.inside) + self.inside.latency
            }
            _ => bytes / (self.between.bandwidth * c.between) + self.between.latency,
        }
    }

    /// How many of such a group are in a node.
    fn near(&self, stride: usize, size: usize) -> usize {
        (self.node / stride.max(1)).max(1).min(size)
    }

    /// Bytes that a step may plan with.
    pub fn usable(&self) -> f64 {
        self.memory * self.coefficients.usable
    }

    /// Refuses numbers that no machine has.
    pub fn check(&self) -> Result<()> {
        crate::model::number("the machine's node", self.node, 1 << 20)?;
        let c = &self.coefficients;
        let positive = [
            ("bf16", self.bf16),
            ("fp8", self.fp8),
            ("memory", self.memory),
            ("bandwidth", self.bandwidth),
            ("inside.bandwidth", self.inside.bandwidth),
            ("between.bandwidth", self.between.bandwidth),
            ("coefficients.products", c.products),
            ("coefficients.flash", c.flash),
            ("coefficients.memory", c.memory),
            ("coefficients.inside", c.inside),
            ("coefficients.between", c.between),
            ("coefficients.usable", c.usable),
        ];
        let others = [
            ("inside.latency", self.inside.latency),
            ("between.latency", self.between.latency),
            ("coefficients.ramp", c.ramp),
            ("coefficients.tensor_overlap", c.tensor_overlap),
            ("coefficients.data_overlap", c.data_overlap),
            ("coefficients.backward", c.backward),
        ];
        let free = ["ramp", "backward"];
        let bad = |(name, x): &(&str, f64), positive: bool| {
            let share = name.strip_prefix("coefficients.");
            let most = match share.is_some_and(|s| !free.contains(&s)) {
                true => 1.0,
                false => f64::MAX,
            };
            !(x.is_finite() && *x <= most && (*x > 0.0 || !positive && *x == 0.0))
        };
        let wrong = (positive.iter().find(|p| bad(p, true)))
            .or_else(|| others.iter().find(|p| bad(p, false)));
        match wrong {
            None => Ok(()),
            Some((name, got)) => Err(Error::Number {
                what: format!("the machine's {name}"),
                got: got.to_string(),
                valid: "it is a positive number, and shares are at most 1".into(),
            }),
        }
    }
}
