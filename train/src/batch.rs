//! How many sequences go where: batch sizes with their units.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// What is known of the sizes of a batch; [`solve`](Self::solve) finds out the rest.
///
/// Sequences are what a model reads: a sample of text, or one of several generations for a prompt.
///
/// ```text
/// sequences = prompts x generations
/// sequences = global x updates
/// global    = micro x accumulation x dp
/// ```
///
/// | given | gives |
/// |---|---|
/// | global 512, micro 4, dp 8 | accumulation 16 |
/// | prompts 64, generations 8, micro 4, dp 4, updates 2 | sequences 512, global 256, accumulation 16 |
/// | micro 4, accumulation 2, dp 8 | global 64 |
/// | global 512, dp 8 | micro 64, accumulation 1 |
/// | global 100, micro 4, dp 8 | an error: the nearest are 96 and 128 |
///
/// ```
/// # use anymesh_train::BatchSpec;
/// let given = BatchSpec { global: Some(512), micro: Some(4), dp: Some(8), ..Default::default() };
/// assert_eq!(given.solve()?.accumulation, 16);
///
/// let given = BatchSpec {
///     prompts: Some(64), generations: Some(8), micro: Some(4), dp: Some(4), updates: Some(2),
///     ..Default::default()
/// };
/// let sizes = given.solve()?;
/// assert_eq!((sizes.sequences, sizes.global, sizes.accumulation), (512, 256, 16));
///
/// let given = BatchSpec { micro: Some(4), accumulation: Some(2), dp: Some(8), ..Default::default() };
/// assert_eq!(given.solve()?.global, 64);
///
/// let given = BatchSpec { global: Some(512), dp: Some(8), ..Default::default() };
/// assert_eq!((given.solve()?.micro, given.solve()?.accumulation), (64, 1));
///
/// let given = BatchSpec { global: Some(100), micro: Some(4), dp: Some(8), ..Default::default() };
/// assert_eq!(
///     given.solve().expect_err("no multiple").to_string(),
///     "batch: global batch 100 is not a multiple of micro batch 4 x dp 8 = 32: the nearest are 96 and 128"
/// );
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BatchSpec {
    /// Prompts of a round, each of which is answered several times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<u64>,
    /// Sequences for each prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generations: Option<u64>,
    /// Sequences of one step of the optimizer, over all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global: Option<u64>,
    /// Sequences that a data-parallel rank computes at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro: Option<u64>,
    /// Micro-batches of a rank whose gradients are added up for one step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulation: Option<u64>,
    /// Data-parallel ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp: Option<u64>,
    /// Steps of the optimizer on the sequences of a round.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub updates: Option<u64>,
}

/// All sizes of a batch, which agree with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BatchSize {
    /// Prompts of a round.
    pub prompts: u64,
    /// Sequences for each prompt.
    pub generations: u64,
    /// Sequences of a round: prompts times generations.
    pub sequences: u64,
    /// Steps of the optimizer on the sequences of a round.
    pub updates: u64,
    /// Sequences of one step of the optimizer, over all ranks.
    pub global: u64,
    /// Micro-batches of a rank whose gradients are added up for one step.
    pub accumulation: u64,
    /// Sequences that a data-parallel rank computes at once.
    pub micro: u64,
    /// Data-parallel ranks.
    pub dp: u64,
}

/// A size by name, as far as it is known.
type Term = (&'static str, Option<u64>);

impl BatchSpec {
    /// The sizes that were not given, from those that were. Where several would do, there is one
    /// update, one rank, no accumulation, and one generation for each prompt.
    pub fn solve(&self) -> Result<BatchSize> {
        let mut known = *self;
        for (name, size) in known.terms() {
            if *size == Some(0) {
                return Err(wrong(format!("{name} is 0: at least 1 is needed")));
            }
        }
        if known.prompts.or(known.global).or(known.micro).is_none() {
            return Err(wrong(
                "none of global batch, micro batch and prompts is given: how many sequences is up to you".into(),
            ));
        }
        loop {
            known.derive()?;
            if let Some(sizes) = known.sizes()? {
                return Ok(sizes);
            }
            // What would do without being given, in this order.
            let free = [
                &mut known.updates,
                &mut known.dp,
                &mut known.accumulation,
                &mut known.generations,
            ];
            match free.into_iter().find(|size| size.is_none()) {
                Some(size) => *size = Some(1),
                None => return Err(wrong("the sizes do not tell all of them".into())),
            }
        }
    }

    fn terms(&mut self) -> [(&'static str, &mut Option<u64>); 7] {
        [
            ("prompts", &mut self.prompts),
            ("generations", &mut self.generations),
            ("global batch", &mut self.global),
            ("micro batch", &mut self.micro),
            ("accumulation", &mut self.accumulation),
            ("dp", &mut self.dp),
            ("updates", &mut self.updates),
        ]
    }

    /// What follows from what is known, until nothing more does.
    fn derive(&mut self) -> Result<()> {
        loop {
            let before = *self;
            // global = micro x accumulation x dp
            let (mut global, mut parts) = (self.global, self.parts());
            solve(
                &mut global,
                |g| (format!("global batch {g}"), "is"),
                &mut parts,
            )?;
            self.global = global;
            [self.micro, self.accumulation, self.dp] = parts.map(|(_, size)| size);
            // sequences = prompts x generations = global x updates
            let pair = [("prompts", self.prompts), ("generations", self.generations)];
            let round = product(&pair)?;
            if let (Some(sequences), [(_, Some(p)), (_, Some(g))]) = (round, pair) {
                let text = format!("{p} prompts x {g} generations = {sequences} sequences");
                self.cut(sequences, &text)?;
            } else if let Some(sequences) =
                product(&[("global batch", self.global), ("updates", self.updates)])?
            {
                let mut pair = pair;
                solve(
                    &mut Some(sequences),
                    |n| (format!("{n} sequences"), "are"),
                    &mut pair,
                )?;
                [self.prompts, self.generations] = pair.map(|(_, size)| size);
            }
            if *self == before {
                return Ok(());
            }
        }
    }

    fn parts(&self) -> [Term; 3] {
        [
            ("micro batch", self.micro),
            ("accumulation", self.accumulation),
            ("dp", self.dp),
        ]
    }

    /// What follows from the number of sequences of a round.
    fn cut(&mut self, sequences: u64, text: &str) -> Result<()> {
        let say = |_| (text.to_string(), "are");
        let mut total = Some(sequences);
        // Where the global batch follows only from its parts, those are what a user can change.
        let [micro, accumulation, dp] = self.parts();
        let unknown = self
            .parts()
            .iter()
            .filter(|(_, size)| size.is_none())
            .count();
        if self.global.is_none() && unknown == 1 && self.updates.is_some() {
            let mut terms = [micro, accumulation, dp, ("updates", self.updates)];
            // One update is not worth a word.
            let used = if self.updates == Some(1) { 3 } else { 4 };
            solve(&mut total, say, &mut terms[..used])?;
            [self.micro, self.accumulation, self.dp] = [terms[0].1, terms[1].1, terms[2].1];
            return Ok(());
        }
        let mut terms = [("global batch", self.global), ("updates", self.updates)];
        solve(&mut total, say, &mut terms)?;
        [self.global, self.updates] = terms.map(|(_, size)| size);
        Ok(())
    }

    /// All sizes, if they are known.
    fn sizes(&self) -> Result<Option<BatchSize>> {
        let all = || {
            Some(BatchSize {
                prompts: self.prompts?,
                generations: self.generations?,
                sequences: 0,
                updates: self.updates?,
                global: self.global?,
                accumulation: self.accumulation?,
                micro: self.micro?,
                dp: self.dp?,
            })
        };
        let Some(mut sizes) = all() else {
            return Ok(None);
        };
        let pair = [("prompts", self.prompts), ("generations", self.generations)];
        sizes.sequences = product(&pair)?.unwrap_or(0);
        Ok(Some(sizes))
    }
}

/// Fills in the one size that is not known of `total = terms[0] x terms[1] x ..`, and refuses what
/// cannot be. `say` names the total.
fn solve(
    total: &mut Option<u64>,
    say: impl Fn(u64) -> (String, &'static str),
    terms: &mut [Term],
) -> Result<()> {
    let known: Vec<Term> = terms.iter().filter(|(_, s)| s.is_some()).copied().collect();
    let product = product(&known)?.unwrap_or(1);
    let all = known.len() == terms.len();
    let Some(sum) = *total else {
        if all {
            *total = Some(product);
        }
        return Ok(());
    };
    let (name, is) = say(sum);
    let listed: Vec<String> = known
        .iter()
        .map(|(name, size)| format!("{name} {}", size.unwrap_or(1)))
        .collect();
    let divisor = match listed.len() {
        0 | 1 => listed.concat(),
        _ => format!("{} = {product}", listed.join(" x ")),
    };
    if all && sum != product {
        let advice: Vec<String> = known
            .iter()
            .filter_map(|(name, size)| {
                let others = product / (*size)?;
                let size = sum / others;
                (sum % others == 0).then(|| format!("{name} {size}"))
            })
            .collect();
        let advice = match advice.is_empty() {
            true => String::new(),
            false => format!(", or give {}", advice.join(" or ")),
        };
        return Err(wrong(format!(
            "{name} {is} not {divisor}: {product} would do{advice}"
        )));
    }
    // With several unknown sizes, too, the total must be a multiple of what is known.
    if !all && !sum.is_multiple_of(product) {
        let below = sum / product * product;
        let nearest = match (below, below.checked_add(product)) {
            (0, Some(above)) => format!("the nearest is {above}"),
            (below, Some(above)) => format!("the nearest are {below} and {above}"),
            (below, None) => format!("the nearest is {below}"),
        };
        return Err(wrong(format!(
            "{name} {is} not a multiple of {divisor}: {nearest}"
        )));
    }
    let mut unknown = terms.iter_mut().filter(|(_, size)| size.is_none());
    if let (Some((_, size)), None) = (unknown.next(), unknown.next()) {
        *size = Some(sum / product);
    }
    Ok(())
}

/// The product of sizes; none where one is not known.
fn product(terms: &[Term]) -> Result<Option<u64>> {
    let mut product = 1u64;
    for (_, size) in terms {
        let Some(size) = size else {
            return Ok(None);
        };
        product = product.checked_mul(*size).ok_or_else(|| {
            let listed: Vec<String> = terms
                .iter()
                .filter_map(|(name, size)| Some(format!("{name} {}", (*size)?)))
                .collect();
            wrong(format!("{} is more than 2^64", listed.join(" x ")))
        })?;
    }
    Ok(Some(product))
}

fn wrong(detail: String) -> Error {
    Error::config("batch", detail)
}

#[cfg(test)]
mod tests;
