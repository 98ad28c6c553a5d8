//! Which of the library's algorithms is fastest for a product, as a table in a file.
//!
//! The library guesses which algorithm is best for a problem. Trying all of them finds a better one
//! now and then; but algorithms add in different orders, and what is measured varies, so a choice
//! that is measured anew in every run would give other bits in every run. Hence a table that a user
//! makes once and names from then on:
//!
//! ```text
//! ANYMESH_PRODUCTS=products.txt ANYMESH_PRODUCTS_TUNE=1 ./train   # measures what is not in it yet
//! ANYMESH_PRODUCTS=products.txt ./train                           # takes what is in it
//! ```
//!
//! A line has the GPU, the version of the library and the problem, and then the number of the
//! algorithm among those that the library offers. Lines of other GPUs and versions are left alone.

use super::plan::{CHOICES, Matrix, Problem};
use anymesh_kernel::{Error, Result};
use cudarc::cublaslt::sys;
use std::{
    collections::HashMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// The table of a GPU.
#[derive(Debug, Default)]
pub(super) struct Tuned {
    /// The file, and whether what is not in it is measured.
    file: Option<(PathBuf, bool)>,
    /// What lines of this GPU and this library begin with.
    prefix: String,
    choices: Mutex<HashMap<String, usize>>,
}

fn matrix(matrix: &Matrix) -> String {
    let turned = if matrix.transposed { "t" } else { "n" };
    let (leading, step) = (matrix.leading, matrix.batch_step);
    format!("{turned} {leading} {step} {}", matrix.alignment)
}

/// A problem in words.
fn text(problem: &Problem) -> String {
    let Problem { m, n, k, batch, .. } = problem;
    let factors = match problem.dtype == problem.right {
        true => problem.dtype.to_string(),
        false => format!("{} {}", problem.dtype, problem.right),
    };
    format!(
        "{factors} {} {m}x{n}x{k} batch {batch} a {} b {} out {}{}",
        problem.stored,
        matrix(&problem.a),
        matrix(&problem.b),
        problem.out_alignment,
        if problem.biased { " bias" } else { "" }
    )
}

/// The choices of lines with this prefix, or which line is none.
fn parse(text: &str, prefix: &str) -> Result<HashMap<String, usize>, (usize, String)> {
    let mut choices = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let wrong = || (number + 1, line.to_string());
        let (name, choice) = line.rsplit_once(';').ok_or_else(wrong)?;
        let choice: usize = choice.trim().parse().map_err(|_| wrong())?;
        if choice >= CHOICES || name.split(';').count() != 3 {
            return Err(wrong());
        }
        if let Some(problem) = name.strip_prefix(prefix) {
            choices.insert(problem.trim().to_string(), choice);
        }
    }
    Ok(choices)
}

impl Tuned {
    /// The table that the environment names; an empty one where it names none.
    pub(super) fn of_environment(gpu: &str) -> Result<Self, String> {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let measures = set("ANYMESH_PRODUCTS_TUNE").is_some_and(|value| value != "0");
        let Some(file) = set("ANYMESH_PRODUCTS") else {
            return match measures {
                true => Err("ANYMESH_PRODUCTS_TUNE is set, and ANYMESH_PRODUCTS does not say in which file to keep what is measured".into()),
                false => Ok(Self::default()),
            };
        };
        // SAFETY: asks for a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        Self::open(Path::new(&file), measures, &format!("{gpu}; {version}; "))
    }

    fn open(file: &Path, measures: bool, prefix: &str) -> Result<Self, String> {
        let name = file.display();
        let text = match fs::read_to_string(file) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && measures => String::new(),
            Err(e) => {
                return Err(format!(
                    "the table of products {name} cannot be read: {e}; set ANYMESH_PRODUCTS_TUNE=1 to make one"
                ));
            }
            Ok(text) => text,
        };
        let choices = parse(&text, prefix).map_err(|(number, line)| {
            format!(
                "line {number} of the table of products {name} is none of a GPU, a version, a problem and a number below {CHOICES}: '{line}'"
            )
        })?;
        Ok(Self {
            file: Some((file.into(), measures)),
            prefix: prefix.into(),
            choices: Mutex::new(choices),
        })
    }

    fn choices(&self) -> std::sync::MutexGuard<'_, HashMap<String, usize>> {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the algorithm for a problem, if the table has it.
    pub(super) fn choice(&self, problem: &Problem) -> Option<usize> {
        self.file.as_ref()?;
        self.choices().get(&text(problem)).copied()
    }

    /// Whether problems that are not in the table are measured.
    pub(super) fn measures(&self) -> bool {
        self.file.as_ref().is_some_and(|(_, measures)| *measures)
    }

    /// Keeps the fastest of the algorithms with these times (in us; some may have failed), and
    /// returns its number.
    pub(super) fn keep(&self, problem: &Problem, times: &[Result<f64, String>]) -> Result<usize> {
        let (best, note) = fastest(times);
        let problem = text(problem);
        if let Some((file, _)) = &self.file {
            let line = format!("{}{problem}; {best} # {note}\n", self.prefix);
            let written = (fs::OpenOptions::new().create(true).append(true).open(file))
                .and_then(|mut file| file.write_all(line.as_bytes()));
            written.map_err(|e| Error::DeviceFailed {
                device: "cuda".into(),
                detail: format!(
                    "the table of products {} cannot be written: {e}",
                    file.display()
                ),
            })?;
        }
        self.choices().insert(problem, best);
        Ok(best)
    }
}

/// The number of the fastest algorithm, and a word on it. The library's first choice stays unless
/// another one takes 1 % less.
fn fastest(times: &[Result<f64, String>]) -> (usize, String) {
    let measured = (times.iter().enumerate())
        .filter_map(|(number, time)| time.as_ref().ok().map(|time| (number, *time)));
    let best = measured.clone().min_by(|a, b| a.1.total_cmp(&b.1));
    let first = measured.clone().find(|(number, _)| *number == 0);
    match (best, first) {
        (Some((_, best)), Some((_, first))) if best > 0.99 * first => (0, format!("{first:.1} us")),
        (Some((number, best)), Some((_, first))) => {
            (number, format!("{best:.1} us, the first choice {first:.1}"))
        }
        (Some((number, best)), None) => (number, format!("{best:.1} us")),
        (None, _) => (0, "none could be timed".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anymesh_kernel::DType;

    fn problem(m: u64) -> Problem {
        let matrix = Matrix {
            transposed: false,
            leading: 768,
            batch_step: 0,
            alignment: 256,
        };
        Problem {
            dtype: DType::BF16,
            right: DType::BF16,
            stored: DType::F32,
            m,
            n: 768,
            k: 768,
            batch: 1,
            a: matrix,
            b: matrix,
            out_alignment: 256,
            biased: true,
        }
    }

    #[test]
    fn what_was_measured_is_chosen_again() -> Result<(), String> {
        let folder = std::env::temp_dir().join(format!("anymesh-tuned-{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
        let file = folder.join("products.txt");
        let _ = fs::remove_file(&file);
        assert!(Tuned::open(&file, false, "H200; 1; ").is_err(), "no table");
        let tuned = Tuned::open(&file, true, "H200; 1; ")?;
        let times = [Ok(10.0), Err("no".into()), Ok(8.0), Ok(9.0)];
        assert_eq!(tuned.keep(&problem(16), &times), Ok(2));
        assert_eq!(tuned.keep(&problem(32), &[Ok(10.0), Ok(9.95)]), Ok(0));
        let again = Tuned::open(&file, false, "H200; 1; ")?;
        let found = [16, 32, 64].map(|m| again.choice(&problem(m)));
        assert_eq!(found, [Some(2), Some(0), None]);
        let other = Tuned::open(&file, false, "H200; 2; ")?;
        assert_eq!(other.choice(&problem(16)), None, "another library");
        fs::write(&file, "H200; 1; bf16; 9\n").map_err(|e| e.to_string())?;
        let told = Tuned::open(&file, false, "H200; 1; ").err();
        assert!(told.is_some_and(|told| told.contains("line 1 of")));
        fs::remove_dir_all(&folder).map_err(|e| e.to_string())
    }

    #[test]
    fn without_a_table_the_first_choice_is_taken() {
        let tuned = Tuned::default();
        assert_eq!(
            (tuned.choice(&problem(16)), tuned.measures()),
            (None, false)
        );
        assert_eq!(fastest(&[Err("no".into())]).0, 0);
        assert_eq!(fastest(&[Err("no".into()), Ok(3.0)]).0, 1);
    }
}
