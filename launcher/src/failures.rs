//! Which memory holds garbage, because the work that was to fill it could not be done.
//!
//! Work that reads such memory is not done either, so that garbage never reaches anybody as values;
//! work that fills it makes it good again. Mostly there is none, and asking costs a comparison.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// Memory that nobody may read, by its first address, and why.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    ranges: BTreeMap<u64, (u64, Arc<str>)>,
}

impl Failures {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Why memory may not be read, if any of it may not.
    pub(crate) fn find(&self, range: &Range<u64>) -> Option<&Arc<str>> {
        // Ranges do not overlap, so that the last one that begins before the end decides.
        let (_, (end, why)) = self.ranges.range(..range.end).next_back()?;
        (*end > range.start).then_some(why)
    }

    /// Nobody may read this memory.
    pub(crate) fn set(&mut self, range: Range<u64>, why: Arc<str>) {
        self.clear(&range);
        self.ranges.insert(range.start, (range.end, why));
    }

    /// This memory was filled, or belongs to somebody else now.
    pub(crate) fn clear(&mut self, range: &Range<u64>) {
        while let Some((&start, (end, _))) = self.ranges.range(..range.end).next_back()
            && *end > range.start
        {
            self.ranges.remove(&start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_lost_until_it_is_filled() {
        let mut failures = Failures::default();
        assert!(failures.find(&(0..u64::MAX)).is_none());
        failures.set(100..200, "first".into());
        failures.set(300..400, "second".into());
        let why = |range| failures.find(&range).map(|why| &**why);
        assert_eq!(why(0..100), None);
        assert_eq!(why(0..101), Some("first"));
        assert_eq!(why(150..160), Some("first"));
        assert_eq!(why(200..300), None);
        assert_eq!(why(399..1000), Some("second"));
        assert_eq!(why(400..1000), None);
        failures.clear(&(150..350));
        assert!(
            failures.is_empty(),
            "whoever fills a part has the memory now"
        );
    }

    #[test]
    fn the_last_reason_counts() {
        let mut failures = Failures::default();
        failures.set(0..100, "first".into());
        failures.set(50..150, "second".into());
        assert_eq!(failures.find(&(0..50)), None);
        assert_eq!(failures.find(&(60..70)).map(|why| &**why), Some("second"));
    }
}
