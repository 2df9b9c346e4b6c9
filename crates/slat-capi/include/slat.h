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
 The leaf was used. Where hardware does not set this, a use of a leaf without it faults.
 */
#define SLAT_ACCESSED (1 << 2)

/*
 The leaf was written, or may have been.
 */
#define SLAT_DIRTY (1 << 3)

/*
 The first software bit, which the hypervisor may use.
 */
#define SLAT_SOFTWARE_A (1 << 4)

/*
 The second software bit.
 */
#define SLAT_SOFTWARE_B (1 << 5)

/*
 Memory that the guest may read and write, as a fault maps it: accessed and dirty.
 */
#define SLAT_RAM 15

/*
 Size of a `slat_space`, in bytes.
 */
#define SLAT_SPACE_BYTES 2048

/*
 `slat_age` makes the young pages old; without this flag it only looks.
 */
#define SLAT_AGE_CLEAR (1 << 0)

/*
 With `SLAT_AGE_CLEAR`: `slat_age` invalidates at its end. Without this flag, a page that is in a
 TLB may be in use and look old until the TLB drops its entry.
 */
#define SLAT_AGE_FRESH (1 << 1)

/*
 The outcome of a call. Each function names the values that it may return other than
 `SLAT_STATUS_OK`, `SLAT_STATUS_NULL_POINTER`, `SLAT_STATUS_HANDLE`, `SLAT_STATUS_BUSY`, and
 `SLAT_STATUS_ARGUMENT` for a pointer that is not aligned.
 */
enum slat_status {
  /*
   All was done.
   */
  SLAT_STATUS_OK = 0,
  /*
   A pointer that must not be null is null; nothing was done.
   */
  SLAT_STATUS_NULL_POINTER,
  /*
   No live handle at this address: `slat_create` did not make one there, or it was destroyed.
   For `slat_create`: the storage holds a live handle already. Nothing was done.
   */
  SLAT_STATUS_HANDLE,
  /*
   Another thread, or a function that called back from a call in progress, uses the handle;
   nothing was done.
   */
  SLAT_STATUS_BUSY,
  /*
   A number that its enumeration lacks, an unknown flag, a pointer that is not aligned, or a
   size that is not a power of two; nothing was done.
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
   The host address is not aligned to pages, or has more bits than an entry can hold; nothing
   was done.
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
   The platform has no more frames. The function says what was done.
   */
  SLAT_STATUS_OUT_OF_FRAMES,
  /*
   The bitmap has fewer bits than the range has pages; nothing was done.
   */
  SLAT_STATUS_BITMAP,
  /*
   The format, as configured, does not record what the guest uses; nothing was done.
   */
  SLAT_STATUS_NOT_RECORDED,
  /*
   Nothing is mapped there.
   */
  SLAT_STATUS_NOT_MAPPED,
  /*
   The shootdown belongs to another space; nothing was done.
   */
  SLAT_STATUS_FOREIGN,
  /*
   A register of the CPU cannot hold the value, or the CPU lacks a feature that the format was
   configured for.
   */
  SLAT_STATUS_UNSUPPORTED,
  /*
   Another user of the engine, not through this interface, holds an entry. What precedes the
   address is done.
   */
  SLAT_STATUS_CONTENDED,
};

/*
 An instruction of an invalidation. The operand, if it has one, is the value of its register.
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
 The caches to make coherent before the guest sees memory.
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
 The kind of guest access in the fault that `slat_relax` answers.
 */
enum slat_access {
  /*
   A read.
   */
  SLAT_ACCESS_READ = 0,
  /*
   A write.
   */
  SLAT_ACCESS_WRITE,
  /*
   A fetch; the fault does not tell the level.
   */
  SLAT_ACCESS_EXECUTE,
  /*
   A fetch by a user program.
   */
  SLAT_ACCESS_EXECUTE_USER,
  /*
   A fetch by the guest's kernel.
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
 Which levels of the guest may execute from a leaf.
 */
enum slat_execute {
  /*
   No level.
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
   Intel EPT of CPUs without 1g blocks.
   */
  SLAT_FORMAT_KIND_EPT2M,
  /*
   AMD nested paging: 4k, 2m, 1g.
   */
  SLAT_FORMAT_KIND_NPT1G,
  /*
   AMD nested paging without 1g blocks.
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
   A device, with early acknowledgement of writes.
   */
  SLAT_MEMORY_DEVICE,
  /*
   A device, without early acknowledgement of writes.
   */
  SLAT_MEMORY_DEVICE_STRICT,
};

/*
 ID registers of a CPU. Where CPUs differ, each field has the least that any of them offers.
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
  /*
   MIDR_EL1, for errata of invalidations; 0 without.
   */
  uint64_t midr;
};

/*
 A format as a CPU implements it. `slat_default_format` fills it.
 */
struct slat_format {
  /*
   One of `enum slat_format_kind`.
   */
  uint32_t kind;
  /*
   `SLAT_FORMAT_...`; flags of other formats have no effect.
   */
  uint32_t flags;
  /*
   Bits of a host physical address that the CPU implements; 0 for as many as an entry can hold.
   */
  uint32_t output_bits;
};

/*
 One guest's second-stage tables, in the caller's storage. The storage has to be zero before
 `slat_create`, and must not move or be copied afterwards. One thread at a time uses it; a call
 of another returns `SLAT_STATUS_BUSY`.
 */
struct SLAT_ALIGNED(128) slat_space {
  /*
   Only the library uses it.
   */
  uint8_t bytes[SLAT_SPACE_BYTES];
};

/*
 An invalidation of TLBs and walk caches.
 */
struct slat_invalidation {
  /*
   The first guest address; if `bytes` is 0, all of the guest.
   */
  uint64_t start;
  /*
   The number of bytes from there on; 0 for all of the guest.
   */
  uint64_t bytes;
  /*
   The size of every changed leaf, in bytes, if all have one size (Arm: a hint of a level);
   else 0.
   */
  uint64_t leaf;
  /*
   The guest's VMID or ASID, or the number that tags its EPT root.
   */
  uint16_t vmid;
  /*
   Tables were unlinked: invalidate walk caches, too, and not last levels only.
   */
  bool tables;
};

/*
 The obligation to invalidate what operations left stale in TLBs. Until the caller has passed it
 to `slat_complete`, a vCPU may go on using the old rights. A later one of the same space
 includes the earlier ones. If the caller loses it, it stays among what the space owes, and the
 next call that completes covers it.
 */
struct slat_shootdown {
  /*
   The space; 0 if nothing is owed. Only the library uses it.
   */
  uint64_t space;
  /*
   The number of the last operation that it includes. Only the library uses it.
   */
  uint64_t ticket;
};

/*
 The progress of an operation.
 */
struct slat_result {
  /*
   Whether all was done, or why not.
   */
  enum slat_status status;
  /*
   The guest address where it stopped. Everything before it is done, unless the status says
   that nothing was done. 0 if all was done.
   */
  uint64_t at;
  /*
   How much was done, in bytes of guest memory or in pages, as the function says.
   */
  uint64_t done;
};

/*
 The result of an operation, and the invalidation that the caller has to complete, whatever the
 status.
 */
struct slat_owing {
  /*
   The progress of the operation.
   */
  struct slat_result result;
  /*
   To be passed to `slat_complete`.
   */
  struct slat_shootdown owed;
};

/*
 The machine under the tables: functions of the hypervisor, each of which gets `context` first.

 The library copies the structure. Its user promises, for as long as a space made from it lives:

 1. `allocate` returns the physical address of memory of that size, aligned to it, that no other
    code uses until it is passed to `free`, and that entries of the format can hold; 0 if there
    is none.
 2. `phys_to_virt` of an address inside such a frame points to that memory, readable and writable
    until the frame is freed, the same at every call, and is not null.
 3. `invalidate` returns only when no CPU can use a translation, or a walk-cache entry, that it
    names: on every CPU that may hold entries of the guest; `invalidate_local`, only when the
    calling CPU cannot.
 4. No function unwinds, by an exception or `longjmp`.
 5. Each thread that calls the library may call the functions. None of them calls the library
    with the same space, which would return `SLAT_STATUS_BUSY`.
 */
struct slat_platform {
  /*
   Passed to each of the functions; may be null.
   */
  void *context;
  /*
   Allocates a frame for a table or a root: `bytes` bytes, a power of two of at least 4 KiB,
   aligned to its size, with any content. Returns 0 if there is none.
   */
  uint64_t (*allocate)(void *context, size_t bytes);
  /*
   Takes back a frame of `bytes` bytes, which neither software nor hardware reaches any more.
   */
  void (*free)(void *context, uint64_t frame, size_t bytes);
  /*
   Returns the address at which the hypervisor reaches a frame.
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
   The same for the calling CPU alone, which faulted and goes on with the rights of
   `slat_relax`. Null for `invalidate`, which then reaches every CPU at each such fault. Not
   called for x86 and Power.
   */
  void (*invalidate_local)(void *context, const struct slat_invalidation *what);
  /*
   Makes `bytes` bytes of memory at a host address coherent. Null where the machine needs no
   maintenance (x86, RISC-V, Power; Arm with FEAT_S2FWB and CTR_EL0.DIC).
   */
  void (*maintain)(void *context, uint64_t memory, uint64_t bytes, enum slat_maintenance what);
  /*
   One of `enum slat_break_before_make`: that of the CPU that allows least.
   */
  uint32_t break_before_make;
};

/*
 Rights, state and memory type of a leaf, the same for all architectures.
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
 Adjacent leaves of one size, with the same attributes, that were unmapped.
 */
struct slat_unmapped_run {
  /*
   The first guest address.
   */
  uint64_t gpa;
  /*
   The memory behind them, which no CPU reaches any more.
   */
  uint64_t hpa;
  /*
   The size of all leaves together, in bytes.
   */
  uint64_t bytes;
  /*
   The size of each leaf, in bytes.
   */
  uint64_t leaf;
  /*
   Rights and memory type, and the state at the moment of unmapping.
   */
  struct slat_attributes attributes;
};

/*
 The result of translating a guest address.
 */
struct slat_translation {
  /*
   The host address of the byte at that guest address.
   */
  uint64_t hpa;
  /*
   The size of the leaf, in bytes.
   */
  uint64_t leaf;
  /*
   The leaf's rights, state and memory type.
   */
  struct slat_attributes attributes;
};

/*
 The root of the tables, where hardware starts its walks.
 */
struct slat_geometry {
  /*
   The host address of the root.
   */
  uint64_t root;
  /*
   The number of entries of the root, of 8 bytes each.
   */
  uint64_t root_entries;
  /*
   The level of the root's entries; pages are at level 0.
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
 Fills `format` with all features that a CPU offers for a kind of Arm format (one of
 `slat_format_kind`).

 Returns `SLAT_STATUS_UNSUPPORTED` where stage 2 lacks the granule, or its FEAT_LPA2;
 `SLAT_STATUS_ARGUMENT` for a kind that is not Arm's; `SLAT_STATUS_FORMAT` in a build without
 that format.

 # Safety
 `id` is null or points to a value, `format` is null or may be written.
 */
SLAT_MUST_USE
enum slat_status slat_arm64_format(const struct slat_arm64_id *id,
                                   uint32_t kind,
                                   struct slat_format *format);

/*
 Writes the value of `enum slat_break_before_make` that a CPU allows to `answer`. FEAT_BBM level
 2 counts only if the hypervisor handles the TLB conflict abort.

 # Safety
 `id` is null or points to a value, `answer` is null or may be written.
 */
SLAT_MUST_USE
enum slat_status slat_arm64_break_before_make(const struct slat_arm64_id *id,
                                              bool handles_conflicts,
                                              uint32_t *answer);

/*
 Writes the values of VTTBR_EL2 and VTCR_EL2 for tables of an Arm format.

 Returns `SLAT_STATUS_UNSUPPORTED` where the CPU lacks what the format was configured for, or
 cannot have this VMID or root; `SLAT_STATUS_ARGUMENT` for tables that are not Arm's.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `id` is null or points to a value;
 `vttbr` and `vtcr` are null or may be written.
 */
SLAT_MUST_USE
enum slat_status slat_arm64_registers(struct slat_space *space,
                                      const struct slat_arm64_id *id,
                                      uint64_t *vttbr,
                                      uint64_t *vtcr);

/*
 Calls `execute` for each instruction of an invalidation, in order. The platform's `invalidate`
 has to execute them on a CPU whose VTTBR_EL2 holds the guest's VMID.

 Returns `SLAT_STATUS_ARGUMENT` for a kind that is not Arm's or a leaf size that is not a power
 of two, `SLAT_STATUS_FORMAT` in a build without that format, `SLAT_STATUS_UNSUPPORTED` for a
 kind that the CPU lacks, `SLAT_STATUS_RANGE` for a range that is not valid: it calls nothing
 then.

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
 Does `slat_arm64_tlbi` for the calling CPU alone, as `invalidate_local` needs it.

 Returns what `slat_arm64_tlbi` does.

 # Safety
 `id` and `what` are null or point to values. `execute` may be called with `context`, and does
 not unwind.
 */
SLAT_MUST_USE
enum slat_status slat_arm64_tlbi_local(const struct slat_arm64_id *id,
                                       uint32_t kind,
                                       const struct slat_invalidation *what,
                                       void (*execute)(void *context,
                                                       enum slat_tlbi instruction,
                                                       uint64_t operand),
                                       void *context);

/*
 Completes the invalidation `owed`: returns when no CPU uses the old entries any more. It
 completes all that the space owes, so the last of several is enough. One that was completed
 before costs nothing. If nothing is owed any more, it gives back the tables that the operations
 unlinked.

 Returns `SLAT_STATUS_FOREIGN` for another space's, `SLAT_STATUS_ARGUMENT` for one that no
 function returned: nothing is done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`.
 */
SLAT_MUST_USE enum slat_status slat_complete(struct slat_space *space, struct slat_shootdown owed);

/*
 Takes the right to write from every leaf in a range. Once that is completed, each write faults,
 and `slat_relax` gives the right back.

 Returns the bytes that had the right, and what is owed. Errors: `SLAT_STATUS_RANGE`,
 `SLAT_STATUS_CUTS_BLOCK`: nothing is done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`.
 */
SLAT_MUST_USE
struct slat_owing slat_write_protect(struct slat_space *space,
                                     uint64_t gpa,
                                     uint64_t bytes);

/*
 Does `slat_write_protect` for exactly the pages that a bitmap names: bit `i` of word `w` is the
 page `64 * w + i` pages after `gpa`.

 Returns the bytes that had the right, and what is owed. Errors: the errors of
 `slat_write_protect`, at the address where it stopped; the pages before it are done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `bits` is null or points to `words`
 words, which no other code writes meanwhile.
 */
SLAT_MUST_USE
struct slat_owing slat_write_protect_pages(struct slat_space *space,
                                           uint64_t gpa,
                                           const uint64_t *bits,
                                           size_t words);

/*
 Gives every leaf in a range the rights for an access, one of `enum slat_access`, as a fault does
 to a leaf that is there. The caller knows whether the guest may have them.

 Nothing is owed to other CPUs. On Arm and RISC-V it calls the platform's `invalidate_local` (or
 `invalidate`, if that is null), so that the calling CPU, which faulted, drops the old rights (on
 x86 and Power the fault has done so). A caller
 that logs writes reports the page after this call, not before.

 Returns the bytes that changed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, and, except for a read,
 `CUTS_BLOCK`: nothing is done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`.
 */
SLAT_MUST_USE
struct slat_owing slat_relax(struct slat_space *space,
                             uint64_t gpa,
                             uint64_t bytes,
                             uint32_t how);

/*
 Moves the dirty state that hardware set in a range into a bitmap, whose bit 0 is the first page
 of the range. It adds bits and removes none; a block is dirty as a whole. It completes what the
 space owes before and after: a page that the bitmap does not name was not written since the last
 harvest, and the next harvest reports every later write.

 Returns the pages that are dirty and were not in the bitmap. Errors: `SLAT_STATUS_RANGE`,
 `BITMAP`, `CUTS_BLOCK`: nothing is done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `bits` is null or points to `words`
 words, which no other code uses meanwhile.
 */
SLAT_MUST_USE
struct slat_result slat_harvest(struct slat_space *space,
                                uint64_t gpa,
                                uint64_t bytes,
                                uint64_t *bits,
                                size_t words);

/*
 Clears the dirty state of a range, for a caller that knows it already. The pages are clean only
 once that is completed: copy them after it.

 Returns the bytes that changed, and what is owed. Errors: the errors of `slat_write_protect`.

 # Safety
 `space` is null, zero, or was passed to `slat_create`.
 */
SLAT_MUST_USE struct slat_owing slat_clean(struct slat_space *space, uint64_t gpa, uint64_t bytes);

/*
 Finds which pages of a range were used: adds the bits of the young ones to `young`, whose bit 0
 is the first page, and makes them old if `flags` has `SLAT_AGE_CLEAR`. Pages whose entries other
 users of the engine are changing are added to `unanswered`: with this interface alone, none.

 Returns the bits that were added. Errors: `SLAT_STATUS_ARGUMENT` for an unknown flag or for two
 equal pointers, `RANGE`, `BITMAP`, `NOT_RECORDED`: nothing is done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `young` and `unanswered` are null or
 point to `words` words each, which no other code uses meanwhile.
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
 Splits until no leaf that overlaps the range is larger than `to` bytes. Translations, rights and
 state stay as they are, for every byte and at every moment; but where the CPU demands
 break-before-make, an access faults while a block stands broken.

 Returns the bytes of the blocks that were split, and what is owed. Errors:
 `SLAT_STATUS_ARGUMENT`, `RANGE`, `LEAF_SIZE`: nothing is done; `OUT_OF_FRAMES`: what precedes
 `at` is done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`.
 */
SLAT_MUST_USE
struct slat_owing slat_split(struct slat_space *space,
                             uint64_t gpa,
                             uint64_t bytes,
                             uint64_t to);

/*
 Turns tables that the range covers back into blocks of at most `to` bytes, where their leaves
 map contiguous memory with the same rights, memory type and software bits.

 The tables are given back by the call of `slat_complete` that completes what is owed, or by the
 next call that completes it.

 Returns the bytes of the blocks, and what is owed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`,
 `LEAF_SIZE`: nothing is done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`.
 */
SLAT_MUST_USE
struct slat_owing slat_collapse(struct slat_space *space,
                                uint64_t gpa,
                                uint64_t bytes,
                                uint64_t to);

/*
 Fills `format` with the features that most CPUs with this format have. `kind` is one of the
 values of `enum slat_format_kind`. A CPU's registers say what it really has
 (`slat_arm64_format`).

 Returns `SLAT_STATUS_ARGUMENT` if the enumeration lacks `kind`, and then leaves `format` as it
 is.

 # Safety
 `format` is null or may be written.
 */
SLAT_MUST_USE enum slat_status slat_default_format(uint32_t kind, struct slat_format *format);

/*
 Makes empty tables for guest physical addresses of `address_bits` bits, with the VMID `vmid`.

 Returns `SLAT_STATUS_HANDLE` if `space` is live already; `SLAT_STATUS_ARGUMENT` for a number
 that its enumeration lacks; `SLAT_STATUS_FORMAT`, `SLAT_STATUS_ADDRESS_BITS`, and
 `SLAT_STATUS_OUT_OF_FRAMES` if the platform has no frame for the root. Nothing is made then.

 # Safety
 `space` points to a `struct slat_space` that is zero, or that only this library wrote to, and
 that stays where it is while it is live. `platform` keeps the promises of `struct slat_platform`
 until `slat_destroy` has returned. The library reads `platform` and `format` only during the
 call.
 */
SLAT_MUST_USE
enum slat_status slat_create(struct slat_space *space,
                             const struct slat_platform *platform,
                             const struct slat_format *format,
                             uint16_t vmid,
                             uint32_t address_bits);

/*
 Gives back every table. The handle is dead afterwards. The memory that was mapped stays the
 caller's.

 # Safety
 No CPU has the root loaded, nor loads it later. `space` is null, zero, or was passed to
 `slat_create`.
 */
SLAT_MUST_USE enum slat_status slat_destroy(struct slat_space *space);

/*
 Maps `bytes` bytes of guest memory from `gpa` on to the memory at `hpa`, by leaves of at most
 `largest` bytes, as large as alignment allows. Leaves that map the same memory with the same
 attributes already stay.

 Returns `bytes`. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, `HOST_ADDRESS`, `LEAF_SIZE`,
 `ATTRIBUTES`, `OCCUPIED`: nothing is done; `OUT_OF_FRAMES`: what precedes `at` is done.

 # Safety
 `space` is null, zero, or was passed to `slat_create`. The guest may use the memory.
 */
SLAT_MUST_USE
struct slat_result slat_map(struct slat_space *space,
                            uint64_t gpa,
                            uint64_t bytes,
                            uint64_t hpa,
                            struct slat_attributes attributes,
                            uint64_t largest);

/*
 Sets the rights of all that is mapped in a range to exactly those of `rights`; only `SLAT_READ`,
 `SLAT_WRITE` and `execute` count. Splits a block that the range cuts. No CPU uses the old rights
 when this returns.

 Returns the bytes that changed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, `ATTRIBUTES`, and
 `OUT_OF_FRAMES` where a block cannot be split: no rights are changed.

 # Safety
 `space` is null, zero, or was passed to `slat_create`.
 */
SLAT_MUST_USE
struct slat_result slat_protect(struct slat_space *space,
                                uint64_t gpa,
                                uint64_t bytes,
                                struct slat_attributes rights);

/*
 Unmaps a range, and splits a block that the range cuts. Calls `removed` for each run of adjacent
 leaves with the same attributes that was mapped, once no CPU can reach it. `removed` must not
 call this library with the same space.

 Returns the bytes that were mapped. Errors: `SLAT_STATUS_RANGE`, and `OUT_OF_FRAMES` where a
 block cannot be split: nothing is unmapped.

 # Safety
 `space` is null, zero, or was passed to `slat_create`. `removed` may be called with `context`,
 and does not unwind.
 */
SLAT_MUST_USE
struct slat_result slat_unmap(struct slat_space *space,
                              uint64_t gpa,
                              uint64_t bytes,
                              void (*removed)(void *context, const struct slat_unmapped_run *run),
                              void *context);

/*
 Unmaps the leaf that translates `gpa`, and writes it to `removed`. No CPU reaches its memory
 when this returns.

 Returns the bytes of the leaf. Errors: `SLAT_STATUS_NOT_MAPPED`: nothing is mapped there, or the
 address is beyond the guest's addresses.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `removed` is null or may be written.
 */
SLAT_MUST_USE
struct slat_result slat_unmap_leaf(struct slat_space *space,
                                   uint64_t gpa,
                                   struct slat_unmapped_run *removed);

/*
 Translates `gpa`, and writes the result to `translation`.

 Returns `SLAT_STATUS_NOT_MAPPED` if nothing is mapped there, and `SLAT_STATUS_CONTENDED` if
 another CPU's call holds the entry for long; it then writes nothing.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `translation` is null or may be written.
 */
SLAT_MUST_USE
enum slat_status slat_query(struct slat_space *space,
                            uint64_t gpa,
                            struct slat_translation *translation);

/*
 Writes the page-table entry at which a walk for `gpa` ends, as it is in memory, to `raw`, and
 the bytes of guest addresses that the entry covers to `bytes`. For tests.

 Returns `SLAT_STATUS_RANGE` for an address beyond the guest's addresses.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `raw` and `bytes` are null or may be
 written.
 */
SLAT_MUST_USE
enum slat_status slat_descriptor(struct slat_space *space,
                                 uint64_t gpa,
                                 uint64_t *raw,
                                 uint64_t *bytes);

/*
 Writes the root of the tables, where hardware starts its walks, to `geometry`.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `geometry` is null or may be written.
 */
SLAT_MUST_USE enum slat_status slat_root(struct slat_space *space, struct slat_geometry *geometry);

/*
 Writes the value of the register that makes a CPU use the tables to `value`: the EPT pointer,
 VMCB's N_CR3, hgatp, or the first doubleword of Power's partition table entry.

 Returns `SLAT_STATUS_UNSUPPORTED` where that cannot hold the root or the VMID; and on Arm, whose
 registers depend on the CPU: `slat_arm64_registers`.

 # Safety
 `space` is null, zero, or was passed to `slat_create`; `value` is null or may be written.
 */
SLAT_MUST_USE enum slat_status slat_root_register(struct slat_space *space, uint64_t *value);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLAT_H */
