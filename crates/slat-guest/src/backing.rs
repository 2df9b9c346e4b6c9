//! The host memory behind a guest, which faults ask for page by page.

use crate::private::{PrivateAt, PrivatePage};
use core::fmt;
use slat::{Access, Hpa, Memory, PageSize, Software};

/// An address in the backing's own address space: in the VMM's process, in a file, or any number by
/// which the backing finds the memory.
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
    /// Returns the address behind the last byte, or the last address of all if the sum overflows 64
    /// bits.
    pub const fn end(&self) -> Hva {
        Hva(self.start.0.saturating_add(self.bytes))
    }

    /// Returns whether the two ranges have a byte in common.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.bytes != 0
            && other.bytes != 0
            && self.start.0 < other.end().0
            && other.start.0 < self.end().0
    }
}

/// The host memory behind a guest.
///
/// A fault calls these methods while it is inside the guest's tables and holds a reservation of the
/// entry that it is about to fill. So an implementation may take locks under which another thread
/// calls [`Worker::invalidate`](crate::Worker::invalidate). It must not wait for operations that
/// wait for the guest's faults: changes of memslots, reads of logs that hardware keeps, switches of
/// caches, [`Worker::host_wrote`](crate::Worker::host_wrote). For a page that has not arrived yet
/// it returns [`NoPage::Absent`].
///
/// If a method panics, the panic passes through the fault. The page is not mapped, or as it was,
/// or, after a call of `grant`, writable and in the log; a later fault asks again.
///
/// ```
/// # use slat::*;
/// # use slat_guest::*;
/// /// Memory in one piece of the machine's, in blocks of 2 MiB.
/// struct OnePiece {
///     start: Hpa,
///     bytes: u64,
/// }
///
/// impl Backing for OnePiece {
///     fn page(&self, host: Hva, _access: Access) -> Result<Page, NoPage> {
///         if host.0 >= self.bytes {
///             return Err(NoPage::Never);
///         }
///         let (hpa, block) = (Hpa(self.start.0 + host.0), PageSize::SIZE_2M);
///         Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
///     }
/// }
/// ```
pub trait Backing {
    /// Returns the page at `host`, for `access`.
    ///
    /// With [`Access::Write`] an implementation first replaces a page that is shared for reading by
    /// one that is the guest's own, and returns that page to all later faults. When a fault asks
    /// for a write, the present page is not mapped for reading alone anywhere else, neither in
    /// another memslot nor in a vCPU's own tables, and it is not mapped so before that fault is
    /// over.
    ///
    /// # Errors
    /// [`NoPage`] says whether to ask again.
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage>;

    /// Returns the page of private memory at `at`, which only the guest can access. Faults call it
    /// as they call [`Backing::page`].
    ///
    /// # Errors
    /// [`NoPage`]; [`NoPage::Never`] where nothing is private.
    fn private_page(&self, _at: PrivateAt) -> Result<PrivatePage, NoPage> {
        Err(NoPage::Never)
    }

    /// Lets other threads run while a backing of this crate, around this one, waits for a thread
    /// that copies pages: the VMM's [`Host::wait`](crate::Host::wait).
    fn wait(&self) {
        core::hint::spin_loop();
    }

    /// Makes the page at `host`, which the guest may already read, writable, and calls `grant`,
    /// which gives the leaf the right to write without a TLB invalidation. If `grant` does not give
    /// it, the fault empties the leaf and maps it anew.
    ///
    /// Until `grant` has returned, nothing may take the page away or give its address to another
    /// page, and [`Backing::page`] returns [`NoPage::Absent`] for it. So a leaf that another thread
    /// empties meanwhile stays empty, and `grant` cannot mistake another page's leaf for this one.
    /// An implementation that cannot ensure this at once returns `None`, and does not call `grant`.
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
    /// present, physically contiguous and with the same rights.
    pub block: PageSize,
    /// The guest may write it now, without another call of the backing.
    pub write: bool,
    /// The guest may execute it.
    pub execute: bool,
    /// Its memory type.
    pub memory: Memory,
}

/// The guest may write the page: a fault may make its leaf writable without a call of the backing.
pub(crate) const MAY_WRITE: Software = Software::A;
/// The guest may execute the page: a fault may make its leaf executable without a call of the
/// backing.
pub(crate) const MAY_EXECUTE: Software = Software::B;

/// Why the backing has no page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoPage {
    /// The page is being fetched: run the guest again later.
    Absent,
    /// There is no page, or none for this access.
    Never,
}
