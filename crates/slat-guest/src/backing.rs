//! What is behind a guest's memory: the host's side, asked a page at a time.

use crate::private::{PrivateAt, PrivatePage};
use core::fmt;
use slat::{Access, Hpa, Memory, PageSize, Software};

/// An address in the backing's own address space: of the VMM's process, of a file.
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
    /// Its first byte.
    pub start: Hva,
    /// How many bytes it has.
    pub bytes: u64,
}

impl HvaRange {
    /// Behind its last byte; the last address there is where the sum exceeds 64 bits.
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
/// A fault asks while it holds a reservation of the slot it is about to fill, and inside the
/// guest's tables. So implementations may take locks that
/// [`Worker::invalidate`](crate::Worker::invalidate) is called under, and must not wait for what
/// waits for the guest's faults: changes of slots, logs that hardware keeps as they are read,
/// switches of caches, [`Worker::host_wrote`](crate::Worker::host_wrote). What is not there yet is
/// [`NoPage::NotYet`].
pub trait Backing {
    /// The page at `host`, for `access`. With [`Access::Write`] a page that is shared for reading
    /// is made the guest's own first: if that is another page, all faults are answered with it from
    /// then on. When a write is asked for, this page is mapped nowhere for reading alone, neither in
    /// another slot nor in a vCPU's own tables, nor will it be before that fault is over.
    ///
    /// # Errors
    /// [`NoPage`] says whether to ask again.
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage>;

    /// The page of private memory at `at`, which nobody but the guest reaches. Asked as
    /// [`Backing::page`] is.
    ///
    /// # Errors
    /// [`NoPage`]; [`NoPage::Never`] where nothing is private.
    fn private_page(&self, _at: PrivateAt) -> Result<PrivatePage, NoPage> {
        Err(NoPage::Never)
    }

    /// The page at `host` for reading, if it is there: what [`Backing::page`] would answer now, and
    /// nothing is fetched because of it. Faults ask it of pages around them
    /// ([`Config::fault_around`](crate::Config::fault_around)).
    fn at_hand(&self, _host: Hva) -> Option<Page> {
        None
    }

    /// Makes the page at `host`, which the guest may read already, one that may be written, and has
    /// `grant` give it the right where it is mapped, which takes no invalidation. Without, the leaf
    /// is emptied and mapped anew.
    ///
    /// Until `grant` has returned, nobody may take the page away or give its address to another,
    /// and [`Backing::page`] answers [`NoPage::NotYet`] for it: a leaf that is emptied meanwhile
    /// stays empty, and is not taken for what came after it. `None`, and `grant` is not called,
    /// where that cannot be had at once.
    fn make_writable<R>(&self, _host: Hva, _grant: impl FnOnce(Page) -> R) -> Option<R>
    where
        Self: Sized,
    {
        None
    }
}

/// A page of the host's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    /// Its address, a multiple of the format's page size.
    pub hpa: Hpa,
    /// The largest leaf that it may be part of: all of the aligned block of that size around it is
    /// there, without gaps and with the same rights.
    pub block: PageSize,
    /// It may be written now, without asking again.
    pub write: bool,
    /// The guest may execute from it.
    pub execute: bool,
    /// Its memory type.
    pub memory: Memory,
}

/// The guest may write the page: its leaf can become writable without asking the backing.
pub(crate) const MAY_WRITE: Software = Software::A;
/// The guest may execute from it.
pub(crate) const MAY_EXECUTE: Software = Software::B;

/// Why there is no page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoPage {
    /// It is being fetched: run the guest again later.
    NotYet,
    /// There is none, or not for this access.
    Never,
}
