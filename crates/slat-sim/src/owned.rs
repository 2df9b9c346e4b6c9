//! Private memory, which the guest can reach and the host cannot: the owner of each page, as the
//! hardware that protects it records it.
//!
//! A page belongs to the host, or is assigned to one guest address. The hypervisor changes this
//! through [`PrivateHooks`], where it would execute `RMPUPDATE`, or call a TDX module or an RMM. A
//! page that is assigned is reached at its guest address alone, and never by the host. The
//! hypervisor gives it back only when no CPU can reach it.

#[cfg(doc)]
use slat_guest::PrivateHooks;
use slat_guest::{Denial, MemoryKind, PrivateLeaves};
use std::collections::HashMap;

pub(crate) const PAGE: u32 = 12;

/// Pages that are assigned.
#[derive(Default, Debug)]
pub(crate) struct OwnedPages {
    /// The guest's page number, by the host's page number.
    pub pages: HashMap<u64, u64>,
    /// The call that the machine refuses, and its error code.
    pub refuses: Option<(PrivateCall, u64)>,
    pub told: Vec<(PrivateCall, PrivateLeaves)>,
}

/// A call of the hypervisor about private memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PrivateCall {
    /// Pages become private, or shared.
    Convert(MemoryKind),
    /// A leaf is mapped.
    Map,
    /// A block is split.
    Split,
    /// Leaves have gone.
    Removed,
}

impl OwnedPages {
    /// Returns what is wrong if the guest reaches `hpa` at `gpa`.
    pub fn refuses(&self, hpa: u64, gpa: u64) -> Option<&'static str> {
        let owner = self.pages.get(&(hpa >> PAGE))?;
        (*owner != gpa >> PAGE).then_some("it is private memory of another guest address")
    }

    /// Returns what is wrong if the host reaches `hpa`.
    pub fn refuses_host(&self, hpa: u64) -> Option<&'static str> {
        self.pages.contains_key(&(hpa >> PAGE)).then_some("it is the guest's private memory")
    }

    pub fn ask(&mut self, call: PrivateCall, leaves: PrivateLeaves) -> Result<(), Denial> {
        self.told.push((call, leaves));
        let refused = self.refuses.filter(|&(refused, _)| refused == call);
        refused.map_or(Ok(()), |(_, code)| Err(Denial(code)))
    }
}
