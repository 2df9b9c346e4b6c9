//! The host's memory behind a guest, as faults ask for it, page by page.

use crate::private::{PrivateAt, PrivatePage};
use core::fmt;
use slat::{Access, Hpa, Memory, PageSize, Software};

/// An address in the backing's own address space: in the VMM's process, or in a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Hva(pub u64);

impl fmt::Display for Hva {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A range of the backing's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HvaRange {
    /// The first byte.
    pub start: Hva,
    /// The size in bytes.
    pub bytes: u64,
}

impl HvaRange {
    /// The address behind the last byte; the last address of all where the sum exceeds 64 bits.
    pub const fn end(&self) -> Hva {
        Hva(self.start.0.saturating_add(self.bytes))
    }

    /// Whether the two have a byte in common.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start.0 < other.end().0 && other.start.0 < self.end().0
    }
}

/// The host's memory behind a guest.
///
/// A fault calls it while it holds a reservation of the entry it is about to fill, and inside the
/// guest's tables. So implementations may take locks that
/// [`Worker::invalidate`](crate::Worker::invalidate) is called under, and must not wait for
/// operations that wait for the guest's faults: changes of memslots, reads of logs that hardware
/// keeps, switches of caches, [`Worker::host_wrote`](crate::Worker::host_wrote). For a page that is
/// not there yet the answer is [`NoPage::NotYet`].
pub trait Backing {
    /// Returns the page at `host`, for `access`. With [`Access::Write`] a page that is shared for
    /// reading is made the guest's own first: if that is another page, all later faults are
    /// answered with it. When a write is asked for, the present page is mapped nowhere for reading
    /// alone, neither in another memslot nor in a vCPU's own tables, nor will it be before that
    /// fault is over.
    ///
    /// # Errors
    /// [`NoPage`] says whether to ask again.
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage>;

    /// Returns the page of private memory at `at`, which only the guest can reach. Called as
    /// [`Backing::page`] is.
    ///
    /// # Errors
    /// [`NoPage`]; [`NoPage::Never`] where nothing is private.
    fn private_page(&self, _at: PrivateAt) -> Result<PrivatePage, NoPage> {
        Err(NoPage::Never)
    }

    /// Returns the page at `host` for reading, if it is there: the present answer of
    /// [`Backing::page`], without fetching anything. Faults ask it of pages around them
    /// ([`Config::fault_around`](crate::Config::fault_around)).
    fn at_hand(&self, _host: Hva) -> Option<Page> {
        None
    }

    /// Makes the page at `host`, which the guest may read already, writable, and calls `grant` to
    /// give the right where the page is mapped, which takes no invalidation. If it does not, the
    /// leaf is emptied and mapped anew.
    ///
    /// Until `grant` has returned, nothing may take the page away or give its address to another
    /// page, and [`Backing::page`] answers [`NoPage::NotYet`] for it: a leaf that is emptied
    /// meanwhile stays empty, and is not taken for what came after it. Where that cannot be had at
    /// once, the result is `None`, and `grant` is not called.
    fn make_writable<R>(&self, _host: Hva, _grant: impl FnOnce(Page) -> R) -> Option<R>
    where
        Self: Sized,
    {
        None
    }
}

/// A page of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    /// Its address, a multiple of the format's page size.
    pub hpa: Hpa,
    /// The largest leaf that it may be part of: the aligned block of that size around it is all
    /// there, without gaps and with the same rights.
    pub block: PageSize,
    /// It may be written now, without asking the backing again.
    pub write: bool,
    /// The guest may execute it.
    pub execute: bool,
    /// Its memory type.
    pub memory: Memory,
}

/// The guest may write the page: its leaf can become writable without asking the backing.
pub(crate) const MAY_WRITE: Software = Software::A;
/// The guest may execute the page: its leaf can become executable without asking the backing.
pub(crate) const MAY_EXECUTE: Software = Software::B;

/// Why the backing has no page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoPage {
    /// It is being fetched: run the guest again later.
    NotYet,
    /// There is no page, or none for this access.
    Never,
}
