//! A layout as text that a person reads and a model takes.

use anymesh_core::{Device, Error, Mesh, Result, ShardingSpec};
use std::{fmt, str::FromStr};

/// How a model lies on a mesh: axes, where the residual stream and the parameters are cut, what is
/// recomputed.
///
/// ```
/// use anymesh_layout::Layout;
/// let text = "\
/// mesh fsdp=8, tp=4
/// microbatches 2
/// recompute no
/// stream [@fsdp, @tp, _]
/// model.layers.*.mlp.up_proj.weight = [@tp, @fsdp]
/// ";
/// let layout: Layout = text.parse()?;
/// assert_eq!(layout.to_string(), text);
/// assert_eq!(layout.sharding_of("model.layers.31.mlp.up_proj.weight", 2).to_string(), "[@tp, @fsdp]");
/// assert_eq!(layout.sharding_of("model.norm.weight", 1).to_string(), "[_]");
/// let error = "mesh tp=4\nstream tp".parse::<Layout>().unwrap_err();
/// assert!(error.to_string().starts_with("cannot read 'line 2: stream tp' as a layout"), "{error}");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Axes and sizes, major first; without axes a single rank.
    pub mesh: Vec<(String, usize)>,
    /// Into how many parts the batch of a step is cut, one after the other.
    pub microbatches: usize,
    /// Whether layers are computed again in the backward pass.
    pub recompute: bool,
    /// How the residual stream `[batch, length, width]` lies between layers.
    pub stream: ShardingSpec,
    /// Shardings of parameters by the pattern of their names; the first that matches counts. `*` is
    /// any text without a dot. Parameters without a pattern are whole on every rank.
    pub parameters: Vec<(String, ShardingSpec)>,
}

impl Layout {
    /// The mesh on a device.
    pub fn mesh(&self, device: &Device) -> Result<Mesh> {
        if self.mesh.is_empty() {
            return Mesh::new("rank=1", device);
        }
        Mesh::new(&axes_text(&self.mesh), device)
    }

    /// The size of an axis; 1 where there is none of this name.
    pub fn size(&self, axis: &str) -> usize {
        let found = self.mesh.iter().find(|(name, _)| name == axis);
        found.map_or(1, |(_, size)| *size)
    }

    /// The sharding of a parameter with so many dimensions.
    pub fn sharding_of(&self, name: &str, rank: usize) -> ShardingSpec {
        let found = self.parameters.iter().find(|(p, _)| matches(p, name));
        found.map_or_else(|| cut(&vec![vec![]; rank]), |(_, spec)| spec.clone())
    }
}

/// A sharding by the axes that cut each dimension.
pub(crate) fn cut(dims: &[Vec<&str>]) -> ShardingSpec {
    let dim = |axes: &Vec<&str>| match axes.is_empty() {
        true => "_".to_string(),
        false => axes.iter().map(|a| format!("@{a}")).collect(),
    };
    let dims: Vec<String> = dims.iter().map(dim).collect();
    // Axis names are words, so this is always a sharding.
    format!("[{}]", dims.join(", ")).parse().unwrap_or_default()
}

fn axes_text(axes: &[(String, usize)]) -> String {
    let axis = |(name, size): &(String, usize)| format!("{name}={size}");
    axes.iter().map(axis).collect::<Vec<_>>().join(", ")
}

/// The name with layer numbers replaced by `*`: what equal parameters of equal layers share.
pub fn pattern_of(name: &str) -> String {
    let fold = |part: &str| match !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
        true => "*".to_string(),
        false => part.to_string(),
    };
    name.split('.').map(fold).collect::<Vec<_>>().join(".")
}

/// Whether a name is one of a pattern's.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            let end = rest.find('.').unwrap_or(rest.len());
            (0..=end).any(|i| rest.is_char_boundary(i) && matches(after, &rest[i..]))
        }),
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = if self.recompute { "yes" } else { "no" };
        writeln!(f, "mesh {}", axes_text(&self.mesh))?;
        writeln!(f, "microbatches {}\nrecompute {yes}", self.microbatches)?;
        writeln!(f, "stream {}", self.stream)?;
        for (pattern, sharding) in &self.parameters {
            writeln!(f, "{pattern} = {sharding}")?;
        }
        Ok(())
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut layout = Layout {
            mesh: vec![],
            microbatches: 1,
            recompute: false,
            stream: cut(&[vec![], vec![], vec![]]),
            parameters: vec![],
        };
        let mut seen = vec![];
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or("").trim();
            if line.is_empty() {
                continue;
            }
            let error = |expected: String| Error::Parse {
                what: "layout",
                text: format!("line {}: {line}", number + 1),
                expected,
            };
            let spec = |text: &str| {
                let spec = text.trim().parse::<ShardingSpec>();
                spec.map_err(|e| error(format!("a sharding ({e})")))
            };
            let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            let value = value.trim();
            let is_new = |name: &str, seen: &mut Vec<String>| {
                if seen.iter().any(|s| s == name) {
                    return Err(error(format!("{name} once")));
                }
                seen.push(name.into());
                Ok(())
            };
            if let Some((pattern, sharding)) = line.split_once('=').filter(|_| key != "mesh") {
                let pattern = pattern.trim();
                is_new(pattern, &mut seen)?;
                layout.parameters.push((pattern.into(), spec(sharding)?));
                continue;
            }
            is_new(key, &mut seen)?;
            match key {
                "mesh" => layout.mesh = axes(value).map_err(error)?,
                "microbatches" => {
                    let count = value.parse().ok().filter(|n| *n > 0);
                    layout.microbatches = count.ok_or_else(|| error("a number above 0".into()))?;
                }
                "recompute" => {
                    layout.recompute = match value {
                        "yes" => true,
                        "no" => false,
                        _ => return Err(error("yes or no".into())),
                    }
                }
                "stream" => layout.stream = spec(value)?,
                _ => {
                    return Err(error(
                        "mesh, microbatches, recompute, stream or `pattern = [sharding]`".into(),
                    ));
                }
            }
        }
        Ok(layout)
    }
}

/// Reads `dp=2, tp=4`; nothing for a single rank.
fn axes(text: &str) -> std::result::Result<Vec<(String, usize)>, String> {
    if text.is_empty() {
        return Ok(vec![]);
    }
    let expected = || "axes with sizes, such as `dp=2, tp=4`".to_string();
    let axis = |axis: &str| {
        let (name, size) = axis.split_once('=').ok_or_else(expected)?;
        let size = size.trim().parse().ok().filter(|n| *n > 0);
        Ok((name.trim().to_string(), size.ok_or_else(expected)?))
    };
    text.split(',').map(axis).collect()
}

impl Layout {
    /// The stream's sharding for a tensor that has only its first dimensions, such as indices.
    pub fn stream_of(&self, rank: usize) -> ShardingSpec {
        let text = self.stream.to_string();
        let dims = text.trim_start_matches('[').trim_end_matches(']');
        let dims: Vec<&str> = dims.split(", ").take(rank).collect();
        format!("[{}]", dims.join(", ")).parse().unwrap_or_default()
    }
}
