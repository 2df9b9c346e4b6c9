/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Second-stage page tables for hypervisors: made of the crate slat-capi, not to be edited. */

#ifndef SLAT_H
#define SLAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define SLAT_MUST_USE __attribute__((warn_unused_result))
#define SLAT_ALIGNED(bytes) __attribute__((aligned(bytes)))
#else
#error "slat.h is for GCC and Clang"
#endif

/*
 Arm: HCR_EL2.FWB, stage 2 forces the memory type. EPT: normal memory ignores the guest's PAT.
 */
#define SLAT_FORMAT_FORCED_WRITE_BACK (1 << 0)

/*
 Arm: VTCR_EL2.HD, hardware marks the first write to a clean leaf.
 */
#define SLAT_FORMAT_HARDWARE_DIRTY (1 << 1)

/*
 Arm: FEAT_XNX; EPT: mode-based execute control. Rights to execute differ by level.
 */
#define SLAT_FORMAT_SPLIT_EXECUTE (1 << 2)

/*
 EPT: bit 6 of the EPT pointer, hardware sets accessed and dirty bits.
 */
#define SLAT_FORMAT_ACCESSED_DIRTY (1 << 3)

/*
 RISC-V: Svpbmt, leaves have a memory type.
 */
#define SLAT_FORMAT_MEMORY_TYPES (1 << 4)

/*
 The guest may read.
 */
#define SLAT_READ (1 << 0)

/*
 The guest may write. Without `SLAT_DIRTY`, hardware marks the first write.
 */
#define SLAT_WRITE (1 << 1)

/*
 The leaf was used. Where hardware does not set it, a leaf without it faults on use.
 */
#define SLAT_ACCESSED (1 << 2)

/*
 The leaf was written, or may have been.
 */
#define SLAT_DIRTY (1 << 3)

/*
 The first bit that is the hypervisor's own.
 */
#define SLAT_SOFTWARE_A (1 << 4)

/*
 The second.
 */
#define SLAT_SOFTWARE_B (1 << 5)

/*
 Memory that the guest may read and write, as a fault maps it: accessed, dirty.
 */
#define SLAT_RAM 15

/*
 Bytes of a `slat_space`.
 */
#define SLAT_SPACE_BYTES 2048

/*
 `slat_age` makes the pages old that it finds young; else it only looks.
 */
#define SLAT_AGE_CLEAR (1 << 0)

/*
 With `SLAT_AGE_CLEAR`: invalidates at its end. Without, a page that a TLB holds may be in use
 and look old until the TLB forgets it.
 */
#define SLAT_AGE_FRESH (1 << 1)

/*
 What came of a call. Each function names those that it may return beside `SLAT_STATUS_OK`,
 `SLAT_STATUS_NULL_POINTER`, `SLAT_STATUS_HANDLE` and `SLAT_STATUS_BUSY`.
 */
enum slat_status {
  /*
   All was done.
   */
  SLAT_STATUS_OK = 0,
  /*
   A pointer that must not be null is; nothing was done.
   */
  SLAT_STATUS_NULL_POINTER,
  /*
   Not a handle that `slat_create` made where it lies, or one that was destroyed; for
   `slat_create`, storage that holds a live handle already. Nothing was done.
   */
  SLAT_STATUS_HANDLE,
  /*
   Another thread, or a function that calls this one back, is using the handle; nothing was
   done.
   */
  SLAT_STATUS_BUSY,
  /*
   A number that is none of its enumeration, an unknown flag, a pointer that is not aligned, or
   a size that is not a power of two; nothing was done.
   */
  SLAT_STATUS_ARGUMENT,
  /*
   The library was built without this format.
   */
  SLAT_STATUS_FORMAT,
  /*
   The format cannot translate guest addresses of that many bits.
   */
  SLAT_STATUS_ADDRESS_BITS,
  /*
   The range is empty, not aligned to pages, or ends beyond the guest's addresses; nothing was
   done.
   */
  SLAT_STATUS_RANGE,
  /*
   The host address is not aligned to pages, or wider than a descriptor holds; nothing was
   done.
   */
  SLAT_STATUS_HOST_ADDRESS,
  /*
   The format has no leaf of that size; nothing was done.
   */
  SLAT_STATUS_LEAF_SIZE,
  /*
   The format, as configured, has no leaf with these rights, state or memory type; nothing was
   done.
   */
  SLAT_STATUS_ATTRIBUTES,
  /*
   Something else is mapped there; nothing was done.
   */
  SLAT_STATUS_OCCUPIED,
  /*
   The range ends inside a block: split it first. Nothing was done.
   */
  SLAT_STATUS_CUTS_BLOCK,
  /*
   The platform has no more frames. What precedes the address is done.
   */
  SLAT_STATUS_OUT_OF_FRAMES,
  /*
   The bitmap has fewer bits than the range has pages; nothing was done.
   */
  SLAT_STATUS_BITMAP,
  /*
   Nothing records what the guest uses, in this format as configured; nothing was done.
   */
  SLAT_STATUS_NOT_RECORDED,
  /*
   Nothing is mapped there.
   */
  SLAT_STATUS_NOT_MAPPED,
  /*
   The shootdown is another space's; nothing was done.
   */
  SLAT_STATUS_FOREIGN,
  /*
   A register of the CPU cannot hold the value, or the CPU lacks what the format was configured
   for.
   */
  SLAT_STATUS_UNSUPPORTED,
  /*
   Entries are held by somebody who uses the engine beside this interface. What precedes the
   address is done.
   */
  SLAT_STATUS_CONTENDED,
};

/*
 An instruction of an invalidation; those with an operand say what is in its register.
 */
enum slat_tlbi {
  /*
   `dsb ishst`
   */
  SLAT_TLBI_DSB_ISHST = 0,
  /*
   `dsb ish`
   */
  SLAT_TLBI_DSB_ISH,
  /*
   `dsb nshst`
   */
  SLAT_TLBI_DSB_NSHST,
  /*
   `dsb nsh`
   */
  SLAT_TLBI_DSB_NSH,
  /*
   `isb`
   */
  SLAT_TLBI_ISB,
  /*
   `tlbi ipas2e1is, operand`
   */
  SLAT_TLBI_IPAS2E1IS,
  /*
   `tlbi ipas2le1is, operand`
   */
  SLAT_TLBI_IPAS2LE1IS,
  /*
   `tlbi ripas2e1is, operand` (FEAT_TLBIRANGE)
   */
  SLAT_TLBI_RIPAS2E1IS,
  /*
   `tlbi ripas2le1is, operand` (FEAT_TLBIRANGE)
   */
  SLAT_TLBI_RIPAS2LE1IS,
  /*
   `tlbi vmalle1is`
   */
  SLAT_TLBI_VMALLE1IS,
  /*
   `tlbi vmalls12e1is`
   */
  SLAT_TLBI_VMALLS12E1IS,
  /*
   `tlbi ipas2e1, operand`
   */
  SLAT_TLBI_IPAS2E1,
  /*
   `tlbi ipas2le1, operand`
   */
  SLAT_TLBI_IPAS2LE1,
  /*
   `tlbi ripas2e1, operand` (FEAT_TLBIRANGE)
   */
  SLAT_TLBI_RIPAS2E1,
  /*
   `tlbi ripas2le1, operand` (FEAT_TLBIRANGE)
   */
  SLAT_TLBI_RIPAS2LE1,
  /*
   `tlbi vmalle1`
   */
  SLAT_TLBI_VMALLE1,
  /*
   `tlbi vmalls12e1`
   */
  SLAT_TLBI_VMALLS12E1,
};

/*
 Memory that is to be made coherent before the guest sees it.
 */
enum slat_maintenance {
  /*
   Data, cleaned and invalidated to the point of coherency (Arm: `dc civac`).
   */
  SLAT_MAINTENANCE_DATA = 0,
  /*
   Data, and instructions: the guest may fetch what the host has written (Arm: `ic` as well).
   */
  SLAT_MAINTENANCE_INSTRUCTIONS,
};

/*
 How the guest uses memory, in the fault that `slat_relax` answers.
 */
enum slat_access {
  /*
   It reads.
   */
  SLAT_ACCESS_READ = 0,
  /*
   It writes.
   */
  SLAT_ACCESS_WRITE,
  /*
   It executes, at a level that the fault does not tell.
   */
  SLAT_ACCESS_EXECUTE,
  /*
   A user program executes.
   */
  SLAT_ACCESS_EXECUTE_USER,
  /*
   The guest's kernel executes.
   */
  SLAT_ACCESS_EXECUTE_KERNEL,
};

/*
 Which changes of a live entry's size the CPUs allow without a break.
 */
enum slat_break_before_make {
  /*
   Every change breaks: Arm's FEAT_BBM levels 0 and 1, Power.
   */
  SLAT_BREAK_BEFORE_MAKE_ALWAYS = 0,
  /*
   FEAT_BBM level 2, where the hypervisor handles the TLB conflict abort.
   */
  SLAT_BREAK_BEFORE_MAKE_CONFLICT_HANDLED,
  /*
   FEAT_BBM level 3, x86, RISC-V.
   */
  SLAT_BREAK_BEFORE_MAKE_NEVER,
};

/*
 Who may execute from a leaf.
 */
enum slat_execute {
  /*
   Nobody.
   */
  SLAT_EXECUTE_NONE = 0,
  /*
   The guest's kernel and user programs.
   */
  SLAT_EXECUTE_ALL,
  /*
   User programs only.
   */
  SLAT_EXECUTE_USER,
  /*
   The guest's kernel only.
   */
  SLAT_EXECUTE_KERNEL,
};

/*
 A format of tables.
 */
enum slat_format_kind {
  /*
   Arm stage 2, 4 KiB granule: leaves of 4k, 2m, 1g.
   */
  SLAT_FORMAT_KIND_ARM64_K4 = 0,
  /*
   Arm stage 2, 16 KiB granule: 16k, 32m.
   */
  SLAT_FORMAT_KIND_ARM64_K16,
  /*
   Arm stage 2, 64 KiB granule: 64k, 512m.
   */
  SLAT_FORMAT_KIND_ARM64_K64,
  /*
   Arm stage 2, 4 KiB granule with FEAT_LPA2: 52-bit addresses.
   */
  SLAT_FORMAT_KIND_ARM64_LPA2_K4,
  /*
   Arm stage 2, 16 KiB granule with FEAT_LPA2: 52-bit addresses, and leaves of 64g.
   */
  SLAT_FORMAT_KIND_ARM64_LPA2_K16,
  /*
   Intel EPT: 4k, 2m, 1g.
   */
  SLAT_FORMAT_KIND_EPT1G,
  /*
   Intel EPT of CPUs without blocks of 1g.
   */
  SLAT_FORMAT_KIND_EPT2M,
  /*
   AMD nested paging: 4k, 2m, 1g.
   */
  SLAT_FORMAT_KIND_NPT1G,
  /*
   AMD nested paging without blocks of 1g.
   */
  SLAT_FORMAT_KIND_NPT2M,
  /*
   Power radix, partition-scoped: 4k, 2m, 1g.
   */
  SLAT_FORMAT_KIND_POWER_K4,
  /*
   Power radix, partition-scoped: 64k, 2m, 1g.
   */
  SLAT_FORMAT_KIND_POWER_K64,
  /*
   RISC-V's G-stage of a CPU whose widest mode is Sv39x4: 4k, 2m, 1g.
   */
  SLAT_FORMAT_KIND_RISCV_SV39X4,
  /*
   The same, Sv48x4.
   */
  SLAT_FORMAT_KIND_RISCV_SV48X4,
  /*
   The same, Sv57x4.
   */
  SLAT_FORMAT_KIND_RISCV_SV57X4,
};

/*
 Memory type of a leaf.
 */
enum slat_memory {
  /*
   Write-back cacheable.
   */
  SLAT_MEMORY_NORMAL = 0,
  /*
   Normal, not cacheable.
   */
  SLAT_MEMORY_NON_CACHEABLE,
  /*
   A device; early acknowledgement of writes.
   */
  SLAT_MEMORY_DEVICE,
  /*
   A device; no early acknowledgement.
   */
  SLAT_MEMORY_DEVICE_STRICT,
};

/*
 ID registers of a CPU. Where CPUs differ, each field as the least of them has it.
 */
struct slat_arm64_id {
  /*
   ID_AA64MMFR0_EL1.
   */
  uint64_t mmfr0;
  /*
   ID_AA64MMFR1_EL1.
   */
  uint64_t mmfr1;
  /*
   ID_AA64MMFR2_EL1.
   */
  uint64_t mmfr2;
  /*
   ID_AA64ISAR0_EL1.
   */
  uint64_t isar0;
};

/*
 A format as a CPU has it: `slat_default_format` fills it.
 */
struct slat_format {
  /*
   One of `enum slat_format_kind`.
   */
  uint32_t kind;
  /*
   `SLAT_FORMAT_...`; those that are another format's do nothing.
   */
  uint32_t flags;
  /*
   Bits of a host physical address that the CPU implements; 0 for as many as a descriptor
   holds.
   */
  uint32_t output_bits;
};

/*
 One guest's second-stage tables, in storage of the caller's, which has to be zero before
 `slat_create`, and must not move or be copied afterwards. One thread at a time uses it; another
 is answered `SLAT_STATUS_BUSY`.
 */
struct SLAT_ALIGNED(128) slat_space {
  /*
   For the library alone.
   */
  uint8_t bytes[SLAT_SPACE_BYTES];
};

/*
 What must be gone from TLBs and walk caches.
 */
struct slat_invalidation {
  /*
   The first guest address; with `bytes` of 0, all of the guest is meant.
   */
  uint64_t start;
  /*
   So many bytes from there; 0 for all of the guest.
   */
  uint64_t bytes;
  /*
   The size of every changed leaf, in bytes, where it is one (Arm: a hint of a level); else 0.
   */
  uint64_t leaf;
  /*
   The guest: VMID, ASID, or what tags its EPT root.
   */
  uint16_t vmid;
  /*
   Tables were unlinked: walk caches hold stale entries too, not last levels only.
   */
  bool tables;
};

/*
 The obligation to invalidate what operations left in TLBs: until `slat_complete` was given it, a
 vCPU may go on with the old rights. A later one of the same space includes the earlier ones.
 Lost, it joins what the space owes, and the next call that completes covers it.
 */
struct slat_shootdown {
  /*
   Whose; 0 if nothing is owed. For the library alone.
   */
  uint64_t space;
  /*
   Up to which operation. For the library alone.
   */
  uint64_t ticket;
};

/*
 How far an operation came.
 */
struct slat_result {
  /*
   Whether all was done, or why not.
   */
  enum slat_status status;
  /*
   Where it stopped: everything before this guest address is done. 0 where all is, or nothing.
   */
  uint64_t at;
  /*
   How much was done, in bytes of guest memory, or in pages, as the function says.
   */
  uint64_t done;
};

/*
 What an operation did, and what has to be completed for it, whatever the status.
 */
struct slat_owing {
  /*
   How far it came.
   */
  struct slat_result result;
  /*
   For `slat_complete`.
   */
  struct slat_shootdown owed;
};

/*
 The machine under the tables: functions of the hypervisor's, each given `context` first.

 The library copies the structure. Its user promises, for as long as a space made from it lives:

 1. `allocate` returns the physical address of memory of that size, aligned to it, that nobody
    else uses until it is given to `free`, and that descriptors of the format can hold; 0 if
    there is none.
 2. `phys_to_virt` of an address inside such a frame points to that memory, readable and writable
    until it is given back, the same at every call, and is not null.
 3. `invalidate` returns only when no CPU can use a translation, or a walk-cache entry, that it
    names: on every CPU that may hold entries of the guest.
 4. No function unwinds, by an exception or `longjmp`.
 5. Functions may be called from each thread that calls the library; none of them calls the
    library with the same space, which would answer `SLAT_STATUS_BUSY`.
 */
struct slat_platform {
  /*
   Given to each of the functions; may be null.
   */
  void *context;
  /*
   A frame for a table or a root: `bytes`, a power of two of 4 KiB at least, aligned to its
   size, with any content. 0 if there is none.
   */
  uint64_t (*allocate)(void *context, size_t bytes);
  /*
   Takes back a frame of `bytes`, which nobody reaches any more.
   */
  void (*free)(void *context, uint64_t frame, size_t bytes);
  /*
   Where the hypervisor reaches a frame.
   */
  void *(*phys_to_virt)(void *context, uint64_t frame);
  /*
   Makes earlier stores to tables visible to the walkers of all CPUs (Arm: `dsb ishst`).
   */
  void (*publish)(void *context);
  /*
   Makes earlier stores to tables visible, invalidates, and waits for completion on every CPU
   that may hold entries of the guest. `what` is valid during the call.
   */
  void (*invalidate)(void *context, const struct slat_invalidation *what);
  /*
   Makes `bytes` of memory at a host address coherent. Null where the machine needs none (x86,
   RISC-V, Power; Arm with FEAT_S2FWB and CTR_EL0.DIC).
   */
  void (*maintain)(void *context, uint64_t memory, uint64_t bytes, enum slat_maintenance what);
  /*
   One of `enum slat_break_before_make`, of the CPU that allows least.
   */
  uint32_t break_before_make;
};

/*
 Rights, state and memory type of a leaf, in no architecture's words.
 */
struct slat_attributes {
  /*
   `SLAT_READ` to `SLAT_SOFTWARE_B`.
   */
  uint32_t flags;
  /*
   One of `enum slat_execute`.
   */
  uint32_t execute;
  /*
   One of `enum slat_memory`.
   */
  uint32_t memory;
};

/*
 Neighbouring leaves of one size and one set of attributes that were taken out.
 */
struct slat_removed {
  /*
   Where they stood.
   */
  uint64_t gpa;
  /*
   The memory behind them: no CPU reaches it any more.
   */
  uint64_t hpa;
  /*
   Bytes of all of them.
   */
  uint64_t bytes;
  /*
   The size of each, in bytes.
   */
  uint64_t leaf;
  /*
   Rights and memory type, and the state at the moment they were taken out.
   */
  struct slat_attributes attributes;
};

/*
 What a guest address translates to.
 */
struct slat_translation {
  /*
   The host address of that very byte.
   */
  uint64_t hpa;
  /*
   The size of the leaf, in bytes.
   */
  uint64_t leaf;
  /*
   Its rights, state and memory type.
   */
  struct slat_attributes attributes;
};

/*
 Where hardware starts its walks.
 */
struct slat_geometry {
  /*
   The host address of the root.
   */
  uint64_t root;
  /*
   Slots of the root, of 8 bytes each.
   */
  uint64_t root_slots;
  /*
   The level of the root's slots, that of pages being 0.
   */
  uint32_t root_level;
  /*
   Bits of a guest physical address.
   */
  uint32_t address_bits;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Fills `format` with what a CPU has of a kind of Arm's (one of `enum slat_format_kind`), with all
 that it offers.

 Returns `SLAT_STATUS_UNSUPPORTED` where stage 2 lacks the granule, or FEAT_LPA2 of it;
 `SLAT_STATUS_ARGUMENT` for a kind that is not Arm's; `SLAT_STATUS_FORMAT` in a build without
 Arm's.

 # Safety
 `id` is null or points to a value, `format` is null or may be written.
 */
SLAT_MUST_USE
enum slat_status slat_arm64_format(const struct slat_arm64_id *id,
                                   uint32_t kind,
                                   struct slat_format *format);

/*
 Writes to `answer` what a CPU allows, of `enum slat_break_before_make`. FEAT_BBM level 2 counts
 only if the hypervisor handles the TLB conflict abort.

 # Safety
 `id` is null or points to a value, `answer` is null or may be written.
 */
SLAT_MUST_USE
enum slat_status slat_arm64_break_before_make(const struct slat_arm64_id *id,
                                              bool handles_conflicts,
                                              uint32_t *answer);

/*
 Writes VTTBR_EL2 and VTCR_EL2 for tables of a format of Arm's.

 Returns `SLAT_STATUS_UNSUPPORTED` where the CPU lacks what the format was configured for, or has
 no such VMID or root; `SLAT_STATUS_ARGUMENT` for tables that are not Arm's.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `id` is null or points to a value; `vttbr`
 and `vtcr` are null or may be written.
 */
SLAT_MUST_USE
enum slat_status slat_arm64_registers(struct slat_space *space,
                                      const struct slat_arm64_id *id,
                                      uint64_t *vttbr,
                                      uint64_t *vtcr);

/*
 Calls `execute` for each instruction of an invalidation, in order: what the platform's
 `invalidate` has to execute on a CPU whose VTTBR_EL2 holds the guest's VMID.

 Returns `SLAT_STATUS_ARGUMENT` for a kind that is not Arm's, `SLAT_STATUS_UNSUPPORTED` for one
 that the CPU lacks, `SLAT_STATUS_RANGE` for a range that is none: nothing is called.

 # Safety
 `id` and `what` are null or point to values. `execute` may be called with `context`, and does
 not unwind.
 */
SLAT_MUST_USE
enum slat_status slat_arm64_tlbi(const struct slat_arm64_id *id,
                                 uint32_t kind,
                                 const struct slat_invalidation *what,
                                 void (*execute)(void *context,
                                                 enum slat_tlbi instruction,
                                                 uint64_t operand),
                                 void *context);

/*
 Completes what `owed` stands for: invalidates it, and returns when no CPU uses it any more. All
 that the space owes is completed with it, so the last of several is enough. One that was
 completed before costs nothing.

 Returns `SLAT_STATUS_FOREIGN` for another space's, `SLAT_STATUS_ARGUMENT` for one that no
 function returned: nothing is done.

 # Safety
 `space` is null, zero, or was given to `slat_create`.
 */
SLAT_MUST_USE enum slat_status slat_complete(struct slat_space *space, struct slat_shootdown owed);

/*
 Takes the right to write from every leaf in a range: once that is completed, each write is a
 fault, which `slat_relax` answers.

 Returns the bytes that had the right, and what is owed. Errors: `SLAT_STATUS_RANGE`,
 `SLAT_STATUS_CUTS_BLOCK`: nothing is done.

 # Safety
 `space` is null, zero, or was given to `slat_create`.
 */
SLAT_MUST_USE
struct slat_owing slat_write_protect(struct slat_space *space,
                                     uint64_t gpa,
                                     uint64_t bytes);

/*
 `slat_write_protect` of exactly the pages that a bitmap names: bit `i` of word `w` is the page
 `64 * w + i` pages behind `gpa`.

 Returns the bytes that had the right, and what is owed. Errors: those of `slat_write_protect`,
 at the first run of pages concerned; the runs before it are done.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `bits` is null or points to `words` words,
 which nobody writes meanwhile.
 */
SLAT_MUST_USE
struct slat_owing slat_write_protect_pages(struct slat_space *space,
                                           uint64_t gpa,
                                           const uint64_t *bits,
                                           size_t words);

/*
 Makes every leaf in a range fit for an access, one of `enum slat_access`, as a fault does to a
 leaf that is there. Whether the guest may do so is for the caller to know.

 Nothing is owed to other CPUs. The calling CPU is made to forget the old rights, as it is the
 one that faulted (Arm, RISC-V; on x86 the fault has done so). Who logs writes reports the page
 after this, not before.

 Returns the bytes that changed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, and, but for a read,
 `CUTS_BLOCK`: nothing is done.

 # Safety
 `space` is null, zero, or was given to `slat_create`.
 */
SLAT_MUST_USE
struct slat_owing slat_relax(struct slat_space *space,
                             uint64_t gpa,
                             uint64_t bytes,
                             uint32_t how);

/*
 Moves the dirty state that hardware set in a range into a bitmap, whose bit 0 is the first page
 of the range. Bits are added, none is removed; a block is dirty as a whole. What the space owes
 is completed before and after: what the bitmap does not name was not written since the last
 harvest, and every later write is in the next.

 Returns the pages that are dirty and were not in the bitmap. Errors: `SLAT_STATUS_RANGE`,
 `BITMAP`, `CUTS_BLOCK`: nothing is done.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `bits` is null or points to `words` words,
 which nobody else uses meanwhile.
 */
SLAT_MUST_USE
struct slat_result slat_harvest(struct slat_space *space,
                                uint64_t gpa,
                                uint64_t bytes,
                                uint64_t *bits,
                                size_t words);

/*
 Clears the dirty state of a range, for a caller who has it already. The pages are clean only
 once that is completed: copy them after it.

 Returns the bytes that changed, and what is owed. Errors: those of `slat_write_protect`.

 # Safety
 `space` is null, zero, or was given to `slat_create`.
 */
SLAT_MUST_USE struct slat_owing slat_clean(struct slat_space *space, uint64_t gpa, uint64_t bytes);

/*
 Which pages of a range were used: adds the bits of the young ones to `young`, whose bit 0 is the
 first page, and makes them old if `flags` say so.

 Returns the bits that were added. Errors: `SLAT_STATUS_ARGUMENT` for a flag that is none,
 `RANGE`, `BITMAP`, `NOT_RECORDED`: nothing is done.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `young` and `unanswered` are null or point
 to `words` words each, which nobody else uses meanwhile. In `unanswered` come pages whose
 entries others are changing: with this interface alone, none.
 */
SLAT_MUST_USE
struct slat_owing slat_age(struct slat_space *space,
                           uint64_t gpa,
                           uint64_t bytes,
                           uint32_t flags,
                           uint64_t *young,
                           uint64_t *unanswered,
                           size_t words);

/*
 Splits until no leaf that overlaps the range is larger than `to` bytes. Translation, rights and
 state stay as they are, for every byte and at every moment; where the CPU demands
 break-before-make, it faults while a block stands broken.

 Returns the bytes of the blocks that were split, and what is owed. Errors:
 `SLAT_STATUS_ARGUMENT`, `RANGE`, `LEAF_SIZE`: nothing is done; `OUT_OF_FRAMES`: what precedes
 `at` is.

 # Safety
 `space` is null, zero, or was given to `slat_create`.
 */
SLAT_MUST_USE
struct slat_owing slat_split(struct slat_space *space,
                             uint64_t gpa,
                             uint64_t bytes,
                             uint64_t to);

/*
 Turns tables that the range covers back into blocks of at most `to` bytes, where their leaves
 continue each other and agree.

 Returns the bytes of the blocks, and what is owed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`,
 `LEAF_SIZE`: nothing is done.

 # Safety
 `space` is null, zero, or was given to `slat_create`.
 */
SLAT_MUST_USE
struct slat_owing slat_collapse(struct slat_space *space,
                                uint64_t gpa,
                                uint64_t bytes,
                                uint64_t to);

/*
 Fills `format` with what most CPUs have that have this format: an entry of
 `enum slat_format_kind`. What a CPU really has is in its registers (`slat_arm64_format`).

 Returns `SLAT_STATUS_ARGUMENT` for a `kind` that is none, and then leaves `format` as it is.

 # Safety
 `format` is null or may be written.
 */
SLAT_MUST_USE enum slat_status slat_default_format(uint32_t kind, struct slat_format *format);

/*
 Makes empty tables for guest physical addresses of `address_bits`, tagged `vmid`.

 Returns `SLAT_STATUS_HANDLE` if `space` is live already; `SLAT_STATUS_ARGUMENT` for a number
 that is none of its enumeration; `SLAT_STATUS_FORMAT`, `SLAT_STATUS_ADDRESS_BITS`, and
 `SLAT_STATUS_OUT_OF_FRAMES` if the platform has no frame for the root. Nothing is made then.

 # Safety
 `space` points to a `struct slat_space` that is zero, or that only this library wrote to, and
 that stays where it is while it is live. `platform` keeps the promises of `struct slat_platform`
 until `slat_destroy` has returned; it and `format` are only read during the call.
 */
SLAT_MUST_USE
enum slat_status slat_create(struct slat_space *space,
                             const struct slat_platform *platform,
                             const struct slat_format *format,
                             uint16_t vmid,
                             uint32_t address_bits);

/*
 Gives back every table; the handle is dead afterwards. The memory that was mapped is the
 caller's.

 # Safety
 No CPU has the root loaded, nor will load it. `space` is null, zero, or was given to
 `slat_create`.
 */
SLAT_MUST_USE enum slat_status slat_destroy(struct slat_space *space);

/*
 Maps `bytes` of guest memory from `gpa` on to the memory at `hpa`, by leaves of at most
 `largest` bytes, as large as alignment allows. What is mapped there already, to the same memory
 with the same attributes, stays.

 Returns `bytes`. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, `HOST_ADDRESS`, `LEAF_SIZE`,
 `ATTRIBUTES`, `OCCUPIED`: nothing is done; `OUT_OF_FRAMES`: what precedes `at` is.

 # Safety
 `space` is null, zero, or was given to `slat_create`. The guest may use the memory.
 */
SLAT_MUST_USE
struct slat_result slat_map(struct slat_space *space,
                            uint64_t gpa,
                            uint64_t bytes,
                            uint64_t hpa,
                            struct slat_attributes attributes,
                            uint64_t largest);

/*
 Sets the rights of all that is mapped in a range to exactly those of `rights`, of which
 `SLAT_READ`, `SLAT_WRITE` and `execute` count; a block that the range cuts is split. No CPU uses
 other rights when this returns.

 Returns the bytes that changed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, `ATTRIBUTES`: nothing
 is done; `OUT_OF_FRAMES`: what precedes `at` is.

 # Safety
 `space` is null, zero, or was given to `slat_create`.
 */
SLAT_MUST_USE
struct slat_result slat_protect(struct slat_space *space,
                                uint64_t gpa,
                                uint64_t bytes,
                                struct slat_attributes rights);

/*
 Unmaps a range; a block that the range cuts is split. `removed` is called for each run of
 neighbouring leaves of one kind that stood there, once no CPU can reach it. It must not call
 this library with the same space.

 Returns the bytes that were mapped. Errors: `SLAT_STATUS_RANGE`: nothing is done;
 `OUT_OF_FRAMES`, for a block that is to be split: what precedes `at` is.

 # Safety
 `space` is null, zero, or was given to `slat_create`. `removed` may be called with `context`,
 and does not unwind.
 */
SLAT_MUST_USE
struct slat_result slat_unmap(struct slat_space *space,
                              uint64_t gpa,
                              uint64_t bytes,
                              void (*removed)(void *context, const struct slat_removed *run),
                              void *context);

/*
 Unmaps the leaf that `gpa` lies in, and writes to `removed` what it was. No CPU reaches its
 memory when this returns.

 Returns the bytes of the leaf. Errors: `SLAT_STATUS_NOT_MAPPED`: nothing is there, or the
 address is beyond the guest's.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `removed` is null or may be written.
 */
SLAT_MUST_USE
struct slat_result slat_unmap_leaf(struct slat_space *space,
                                   uint64_t gpa,
                                   struct slat_removed *removed);

/*
 Writes to `translation` what `gpa` translates to.

 Returns `SLAT_STATUS_NOT_MAPPED` if nothing is mapped there, and then writes nothing.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `translation` is null or may be written.
 */
SLAT_MUST_USE
enum slat_status slat_query(struct slat_space *space,
                            uint64_t gpa,
                            struct slat_translation *translation);

/*
 Writes to `raw` the descriptor that a walk for `gpa` ends at, as it lies in memory, and to
 `bytes` how much of the address space its slot covers. For tests.

 Returns `SLAT_STATUS_RANGE` for an address beyond the guest's.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `raw` and `bytes` are null or may be
 written.
 */
SLAT_MUST_USE
enum slat_status slat_descriptor(struct slat_space *space,
                                 uint64_t gpa,
                                 uint64_t *raw,
                                 uint64_t *bytes);

/*
 Writes to `geometry` where hardware starts its walks.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `geometry` is null or may be written.
 */
SLAT_MUST_USE enum slat_status slat_root(struct slat_space *space, struct slat_geometry *geometry);

/*
 Writes to `value` what makes a CPU use the tables: the EPT pointer, VMCB's N_CR3, hgatp, or the
 first doubleword of Power's partition table entry, as a register holds it.

 Returns `SLAT_STATUS_UNSUPPORTED` where it cannot hold the root or the VMID, and on Arm, whose
 registers need to know the CPU: `slat_arm64_registers`.

 # Safety
 `space` is null, zero, or was given to `slat_create`; `value` is null or may be written.
 */
SLAT_MUST_USE enum slat_status slat_root_register(struct slat_space *space, uint64_t *value);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLAT_H */
