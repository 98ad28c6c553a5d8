//! Decisions of sharding rules: what an op did with its operands' shardings, and what else it could
//! have done.

use crate::{Bar, Bars, Cell, Figure, Show, Table, Unit, bytes};
use anymesh_core::spmd::Decision;

/// Choices that are shown.
const MOST: usize = 6;

/// The rule with its factors, the operands, and the choices there were with their bytes.
///
/// ```
/// use anymesh_core::{DType, Mesh, Tensor, meta, spmd::trace};
/// use anymesh_show::Show;
/// let mesh = Mesh::new("dp=2, tp=4", &meta())?;
/// let x = Tensor::zeros([64, 32], DType::F32, (&mesh, "[@dp, _]"))?;
/// let w = Tensor::zeros([32, 16], DType::F32, (&mesh, "[_, @tp]"))?;
/// let (y, decisions) = trace(|| x.matmul(&w));
/// assert!(decisions[0].text().contains("dp: cuts"));
/// # y?; Ok::<(), anymesh_core::Error>(())
/// ```
impl Show for Decision {
    fn figure(&self) -> Figure {
        let step = match self.step == self.op {
            true => String::new(),
            false => format!(" ({})", self.step),
        };
        let mut figure = Figure::new(format!("{}{step}: {}", self.op, self.rule));
        let Some(first) = self.inputs.first() else {
            return figure;
        };
        let mesh = first.mesh();
        let letters = self.rule.letters();
        let mut factors = Table::new("factors", &["letter", "size", "kind"]).numbers(&[1]);
        for (factor, letter) in self.rule.factors.iter().zip(&letters) {
            let kind = format!("{:?}", factor.kind).to_lowercase();
            factors.row([letter.to_string(), factor.size.to_string(), kind]);
        }
        let solutions = match self.alternatives() {
            Ok(solutions) => solutions,
            Err(error) => return figure.table(factors).note(error.to_string()),
        };
        let heads = ["", "mesh axes", "operands brought to", "received", "owed"];
        let mut table = Table::new("choices", &heads).numbers(&[3, 4]).code(&[2]);
        let mut bars = vec![];
        for (i, solution) in solutions.iter().enumerate().take(MOST) {
            let what = self.describe(solution).0;
            let inputs: Vec<String> = (self.inputs.iter().zip(&solution.inputs))
                .map(|(x, s)| s.type_string(x.dtype(), x.shape(), mesh))
                .collect();
            bars.push(Bar::new(
                &*what,
                [solution.bytes as f64, solution.owed as f64],
            ));
            table.row::<Cell>([
                if i == 0 { "chosen" } else { "or" }.into(),
                what.into(),
                inputs.join(", ").into(),
                Cell::bytes(solution.bytes),
                Cell::bytes(solution.owed),
            ]);
        }
        let owed = solutions.iter().take(MOST).any(|s| s.owed > 0);
        let bars = Bars {
            title: "bytes that the worst rank receives, by choice; the first was taken".into(),
            unit: Unit::Bytes,
            parts: match owed {
                true => vec!["received".into(), "owed by the result".into()],
                false => vec![],
            },
            totals: false,
            bars,
        };
        figure = figure.picture(bars.picture()).table(table).table(factors);
        match solutions.len() {
            n if n > MOST => figure.note(format!("Shown are the best {MOST} of {n} choices.")),
            _ => figure.note(match solutions.first().map_or(0, |s| s.bytes) {
                0 => "Nothing is sent.".to_string(),
                n => format!("The choice sends {} to the worst rank.", bytes(n as f64)),
            }),
        }
    }
}
