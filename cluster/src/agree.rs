//! What processes tell each other so that all do the same.

use crate::{
    carried::Engine,
    recorder::Digest,
    wire::{Receive, Send},
};
use anymesh_core::{DType, Device, Mesh, Result, transport::Incoming};

impl Engine {
    /// Tells every other process a byte and gives theirs, in the order of their numbers. All
    /// processes call it together. `device` is any: bytes stay on the host.
    pub(crate) fn tell_all(
        &self,
        op: &'static str,
        mesh: &Mesh,
        device: &Device,
        own: u8,
    ) -> Result<Vec<u8>> {
        let digest = Digest::default().text(op).0;
        let (mut sends, mut receives) = (vec![], vec![]);
        for peer in (0..self.control.cards.len()).filter(|p| *p != self.control.process) {
            sends.push(Send {
                to: peer,
                bytes: vec![own].into(),
                digest,
            });
            receives.push(Receive {
                from: peer,
                memory: Incoming::new(DType::U8, [1].into(), device)?,
                digest,
            });
        }
        let told = self.transfer(op, mesh, sends, receives, String::new)?;
        Ok(told
            .into_iter()
            .filter_map(|mut memory| memory.bytes().first().copied())
            .collect())
    }
}
