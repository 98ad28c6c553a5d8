//! Other libraries that are installed, and how long the same takes there.

use anymesh_bench::{
    peers::{JAX_STEP, NUMPY_KERNELS, TORCH_KERNELS, TORCH_STEP},
    step::{Measured, Spec},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

/// What measures the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    NumPy,
    PyTorch,
    /// Through torch.compile.
    Compiled,
    Jax,
}

impl Peer {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NumPy => "NumPy",
            Self::PyTorch => "PyTorch",
            Self::Compiled => "torch.compile",
            Self::Jax => "JAX",
        }
    }
}

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Installed {
    /// Why there is no peer at all.
    pub(super) problem: Option<String>,
    numpy: Option<String>,
    torch: Option<String>,
    jax: Option<String>,
    /// Whether PyTorch finds a GPU of NVIDIA.
    cuda: bool,
}

/// What Python says it has.
#[derive(Deserialize)]
struct Found {
    numpy: Option<String>,
    torch: Option<String>,
    jax: Option<String>,
    cuda: bool,
}

/// Prints the versions of libraries, as importing them says.
const FIND: &str = "
import json
def version(name):
    try:
        return __import__(name).__version__
    except Exception:
        return None
found = {name: version(name) for name in ('numpy', 'torch', 'jax')}
found['cuda'] = bool(found['torch']) and __import__('torch').cuda.is_available()
print(json.dumps(found))
";

impl Installed {
    /// None was looked for.
    pub(super) fn nothing() -> Self {
        Self {
            problem: Some("none was asked for (--alone)".into()),
            ..Self::default()
        }
    }

    /// What a Python has.
    pub(super) fn find(python: &str) -> Self {
        let out = Command::new(python).args(["-c", FIND]).output();
        let problem = match out {
            Err(error) => format!(
                "'{python}' cannot be started ({error}): install Python 3, or name one with --python"
            ),
            Ok(out) => match last_line(&out).and_then(|line| {
                serde_json::from_str::<Found>(&line).map_err(|error| error.to_string())
            }) {
                Ok(found) => {
                    return Self {
                        problem: None,
                        numpy: found.numpy,
                        torch: found.torch,
                        jax: found.jax,
                        cuda: found.cuda,
                    };
                }
                Err(error) => format!("'{python}' does not tell what it has: {error}"),
            },
        };
        Self {
            problem: Some(problem),
            ..Self::default()
        }
    }

    /// Whether PyTorch runs where a device is: on the same kind.
    fn torch_for(&self, device: &str) -> bool {
        self.torch.is_some() && (device == "cpu" || self.cuda)
    }

    /// Who measures kernels for a device.
    pub(super) fn of_kernels(&self, device: &str) -> Vec<Peer> {
        let mut peers = vec![];
        if device == "cpu" && self.numpy.is_some() {
            peers.push(Peer::NumPy);
        }
        if self.torch_for(device) {
            peers.push(Peer::PyTorch);
        }
        peers
    }

    /// Who measures a step, and what that is called.
    pub(super) fn of_steps(&self, device: &str, spec: &Spec) -> Vec<(String, Peer)> {
        let mut peers = vec![];
        let plain = spec.mesh.is_none() && self.numpy.is_some();
        if plain && self.torch_for(device) {
            peers.extend([Peer::PyTorch, Peer::Compiled]);
        }
        let small = Spec::named("small").is_ok_and(|small| small == *spec);
        if plain && small && device == "cpu" && self.jax.is_some() {
            peers.push(Peer::Jax);
        }
        peers
            .into_iter()
            .map(|peer| (peer.name().to_string(), peer))
            .collect()
    }

    /// What is there, and what to install where it is not, one a line.
    pub(super) fn lines(&self, device: &str) -> Vec<String> {
        if let Some(problem) = &self.problem {
            return vec![format!("peers: none: {problem}")];
        }
        let line = |name: &str, package: &str, version: &Option<String>, wanted: bool| match (
            version, wanted,
        ) {
            (Some(version), true) => format!("{name} {version}"),
            (Some(version), false) => {
                format!("{name} {version}, which does not run where {device} does")
            }
            (None, _) => format!("{name} is not installed: pip install {package}"),
        };
        let cpu = device == "cpu";
        vec![
            line("NumPy", "numpy", &self.numpy, cpu),
            line("PyTorch", "torch", &self.torch, self.torch_for(device)),
            line("JAX", "jax", &self.jax, cpu),
        ]
    }
}

/// A script as a file, gone when this is dropped.
struct Script(PathBuf);

impl Script {
    fn new(name: &str, text: &str) -> Result<Self, String> {
        let file = format!("anymesh-{name}-{}.py", std::process::id());
        let path = std::env::temp_dir().join(file);
        fs::write(&path, text)
            .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The last line that a program printed, or of what it complained about.
fn last_line(out: &Output) -> Result<String, String> {
    let last = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        text.lines().next_back().map(str::to_string)
    };
    match (out.status.success(), last(&out.stdout)) {
        (true, Some(line)) => Ok(line),
        (true, None) => Err("it printed nothing".into()),
        (false, _) => Err(last(&out.stderr).unwrap_or_else(|| out.status.to_string())),
    }
}

/// The device of a peer: the CPU, or its GPU.
fn own_device(device: &str) -> &'static str {
    match device {
        "cpu" => "cpu",
        _ => "cuda:0",
    }
}

/// A row of a peer.
#[derive(Deserialize)]
struct Timed {
    name: String,
    us: Option<f64>,
}

/// How long rows take elsewhere, in microseconds, of those that there are.
pub(super) fn kernels(
    peer: Peer,
    python: &str,
    device: &str,
    names: &[&str],
) -> Result<BTreeMap<String, f64>, String> {
    let text = match peer {
        Peer::NumPy => NUMPY_KERNELS,
        _ => TORCH_KERNELS,
    };
    let script = Script::new(&format!("kernels-{}", peer.name()), text)?;
    let failed = |error: String| format!("{} failed: {error}", peer.name());
    let mut child = Command::new(python)
        .arg(&script.0)
        .args(["--rows", own_device(device)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    if let Some(mut input) = child.stdin.take() {
        // One that ended early says why below.
        let _ = input.write_all(format!("{}\n", names.join("\n")).as_bytes());
    }
    let out = child
        .wait_with_output()
        .map_err(|error| failed(error.to_string()))?;
    last_line(&out).map_err(failed)?;
    let rows = String::from_utf8_lossy(&out.stdout);
    Ok((rows.lines())
        .filter_map(|line| serde_json::from_str::<Timed>(line).ok())
        .filter_map(|row| Some((row.name, row.us?)))
        .collect())
}

/// What a peer prints of a step.
#[derive(Deserialize)]
struct Step {
    parameters: usize,
    losses: Vec<f64>,
    ms: Vec<f64>,
    #[serde(default)]
    host_ms: Vec<f64>,
    peak: Option<u64>,
}

/// A step elsewhere.
pub(super) fn step(
    peer: Peer,
    python: &str,
    device: &str,
    words: &[&str],
    steps: usize,
) -> Result<Measured, String> {
    let text = match peer {
        Peer::Jax => JAX_STEP,
        _ => TORCH_STEP,
    };
    let script = Script::new(&format!("step-{}", peer.name()), text)?;
    let mut command = Command::new(python);
    command.arg(&script.0);
    match peer {
        Peer::Jax => command.arg("jax1").env("JAX_PLATFORMS", "cpu"),
        _ => {
            let kind = match peer {
                Peer::Compiled => "compile",
                _ => "eager",
            };
            command.args(["-", own_device(device)]).args(words).args([
                "--steps",
                &steps.to_string(),
                "--peer",
                kind,
            ])
        }
    };
    let out = command.output().map_err(|error| error.to_string())?;
    let line = last_line(&out)?;
    let step: Step = serde_json::from_str(&line).map_err(|error| error.to_string())?;
    Ok(Measured {
        name: peer.name().into(),
        dtype: String::new(),
        batch: [0, 0],
        parameters: step.parameters,
        losses: step.losses,
        ms: step.ms,
        host_ms: step.host_ms,
        peak: step.peak.unwrap_or(0),
    })
}
