/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A hypervisor in C as far as its memory goes: a platform, tables of two formats, and their entries
 * held against the manuals'; then rights, a dirty log, splits, unmapping, and what is refused.
 *
 *     cc -std=c11 -I include examples/golden.c libslat_capi.a -o golden && ./golden
 */

#include <slat.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIB 1024ull
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

static unsigned failures;

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            failures++;                                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);             \
        }                                                                      \
    } while (0)

#define SAME(found, expected) same(__LINE__, #found, (uint64_t)(found), (uint64_t)(expected))

static void same(int line, const char *what, uint64_t found, uint64_t expected)
{
    if (found != expected) {
        failures++;
        printf("%s:%d: %s is %#" PRIx64 ", not %#" PRIx64 "\n", __FILE__, line, what, found,
               expected);
    }
}

/* The machine: frames of an arena, at physical addresses of their own, and what was asked of it. */

#define ARENA_FRAMES 96
#define ARENA_START 0x10000000ull

struct machine {
    unsigned char *arena;
    unsigned char taken[ARENA_FRAMES];
    unsigned left;
    unsigned invalidations, local;
    struct slat_invalidation last;
    struct slat_space *space;
    enum slat_status inside;
};

static uint64_t allocate(void *context, size_t bytes)
{
    struct machine *machine = (struct machine *)context;
    size_t frames = bytes / (4 * KIB), first, count;

    if (machine->left < frames)
        return 0;
    for (first = 0; first + frames <= ARENA_FRAMES; first += frames) {
        for (count = 0; count < frames && !machine->taken[first + count]; count++)
            ;
        if (count == frames) {
            memset(machine->taken + first, 1, frames);
            machine->left -= (unsigned)frames;
            return ARENA_START + first * 4 * KIB;
        }
    }
    return 0;
}

static void give_back(void *context, uint64_t frame, size_t bytes)
{
    struct machine *machine = (struct machine *)context;

    memset(machine->taken + (frame - ARENA_START) / (4 * KIB), 0, bytes / (4 * KIB));
    machine->left += (unsigned)(bytes / (4 * KIB));
}

static void *phys_to_virt(void *context, uint64_t frame)
{
    return ((struct machine *)context)->arena + (frame - ARENA_START);
}

static void publish(void *context)
{
    (void)context;
}

static void invalidate(void *context, const struct slat_invalidation *what)
{
    struct machine *machine = (struct machine *)context;

    machine->invalidations++;
    machine->last = *what;
}

static void invalidate_local(void *context, const struct slat_invalidation *what)
{
    struct machine *machine = (struct machine *)context;

    machine->local++;
    machine->last = *what;
}

static struct slat_platform on(struct machine *machine, enum slat_break_before_make changes)
{
    struct slat_platform platform;

    memset(&platform, 0, sizeof(platform));
    memset(machine, 0, sizeof(*machine));
    machine->arena = (unsigned char *)aligned_alloc(2 * MIB, 2 * MIB);
    machine->left = ARENA_FRAMES;
    platform.context = machine;
    platform.allocate = allocate;
    platform.free = give_back;
    platform.phys_to_virt = phys_to_virt;
    platform.publish = publish;
    platform.invalidate = invalidate;
    platform.invalidate_local = invalidate_local;
    platform.break_before_make = (uint32_t)changes;
    return platform;
}

static void off(struct machine *machine)
{
    SAME(machine->left, ARENA_FRAMES);
    free(machine->arena);
}

static struct slat_attributes attributes(uint32_t flags, enum slat_execute execute,
                                         enum slat_memory memory)
{
    struct slat_attributes made;

    made.flags = flags;
    made.execute = (uint32_t)execute;
    made.memory = (uint32_t)memory;
    return made;
}

static struct slat_attributes ram(void)
{
    return attributes(SLAT_RAM, SLAT_EXECUTE_ALL, SLAT_MEMORY_NORMAL);
}

/* What a walk finds, by the manuals alone: 512 entries a table, four levels at most. */
static uint64_t walk(struct machine *machine, struct slat_space *space, uint64_t gpa, int is_ept)
{
    struct slat_geometry root;
    uint64_t table, entry = 0;
    unsigned level;

    SAME(slat_root(space, &root), SLAT_STATUS_OK);
    table = root.root;
    for (level = root.root_level;; level--) {
        uint64_t entries = level == root.root_level ? root.root_entries : 512;
        uint64_t index = (gpa >> (12 + 9 * level)) % entries;
        int is_table;

        memcpy(&entry, (unsigned char *)phys_to_virt(machine, table) + 8 * index, 8);
        /* Arm: bits 1:0 of a table are 11; EPT: any of bits 2:0, and bit 7 clear. */
        is_table = is_ept ? (entry & 7) != 0 && !(entry & 0x80) : (entry & 3) == 3;
        if (level == 0 || !is_table)
            return entry;
        table = entry & 0x0000fffffffff000ull;
    }
}

static uint64_t descriptor(struct slat_space *space, uint64_t gpa)
{
    uint64_t raw = 0, bytes = 0;

    SAME(slat_descriptor(space, gpa, &raw, &bytes), SLAT_STATUS_OK);
    return raw;
}

/* What an unmap handed out. */
struct heap {
    unsigned runs;
    uint64_t bytes;
    struct slat_unmapped_run last;
    struct slat_space *space;
};

static void take(void *context, const struct slat_unmapped_run *run)
{
    struct heap *heap = (struct heap *)context;
    struct slat_translation found;

    heap->runs++;
    heap->bytes += run->bytes;
    heap->last = *run;
    /* A function that is called back finds the handle in use. */
    SAME(slat_query(heap->space, run->gpa, &found), SLAT_STATUS_BUSY);
}

static void arm64(void)
{
    static struct slat_space space;
    struct machine machine;
    struct slat_platform platform = on(&machine, SLAT_BREAK_BEFORE_MAKE_ALWAYS);
    struct slat_format format;
    struct slat_translation found;
    struct slat_unmapped_run leaf;
    struct slat_result done;
    struct slat_owing owing;
    struct heap heap;
    uint64_t dirty[8], gpa = 3 * GIB;
    unsigned before;

    SAME(slat_default_format(SLAT_FORMAT_KIND_ARM64_K4, &format), SLAT_STATUS_OK);
    format.flags |= SLAT_FORMAT_HARDWARE_DIRTY;
    SAME(slat_create(&space, &platform, &format, 7, 40), SLAT_STATUS_OK);

    /*
     * DDI 0487, D8.3: valid, page 0b11, MemAttr 0b1111 in 5:2, S2AP 0b11 in 7:6, SH 0b11 in 9:8, AF
     * bit 10: 0x7ff; a block is 0b01: 0x7fd. DBM is bit 51.
     */
    done = slat_map(&space, gpa, 4 * KIB, 0x80000000, ram(), 4 * KIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, gpa, 0), 0x00080000800007ffull);
    SAME(descriptor(&space, gpa), 0x00080000800007ffull);
    done = slat_map(&space, gpa + 2 * MIB, 2 * MIB, 0x80200000, ram(), GIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, gpa + 2 * MIB + 5, 0), 0x00080000802007fdull);
    done = slat_map(&space, 0, GIB, 0x140000000ull, ram(), GIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, 0, 0), 0x00080001400007fdull);
    /* Writable and clean, not accessed: S2AP[1] and AF clear, DBM set. */
    done = slat_map(&space, gpa + 4 * KIB, 4 * KIB, 0x7c206000,
                    attributes(SLAT_READ | SLAT_WRITE, SLAT_EXECUTE_ALL, SLAT_MEMORY_NORMAL),
                    4 * KIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, gpa + 4 * KIB, 0), 0x000800007c20637full);
    /* A device, nGnRE 0b0001, that nobody executes: XN 0b10 in 54:53. */
    done = slat_map(&space, gpa + 8 * KIB, 4 * KIB, 0x9000000,
                    attributes(SLAT_RAM, SLAT_EXECUTE_NONE, SLAT_MEMORY_DEVICE), 4 * KIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, gpa + 8 * KIB, 0), 0x00480000090007c7ull);

    SAME(slat_query(&space, gpa + 2 * MIB + 5, &found), SLAT_STATUS_OK);
    SAME(found.hpa, 0x80200005);
    SAME(found.leaf, 2 * MIB);
    SAME(found.attributes.flags, SLAT_RAM);

    /* A dirty log by faults: split, protect, complete; a write faults; its page is let go on. */
    before = machine.invalidations;
    owing = slat_split(&space, gpa + 2 * MIB, 2 * MIB, 4 * KIB);
    SAME(owing.result.status, SLAT_STATUS_OK);
    SAME(owing.result.done, 2 * MIB);
    SAME(machine.invalidations - before, 1);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    before = machine.invalidations;
    owing = slat_write_protect(&space, gpa + 2 * MIB, 2 * MIB);
    SAME(owing.result.done, 2 * MIB);
    SAME(machine.invalidations, before);
    /* S2AP[1] and DBM clear; bit 57 remembers that the page was written. */
    SAME(walk(&machine, &space, gpa + 2 * MIB, 0), 0x020000008020077full);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    SAME(machine.invalidations, before + 1);
    SAME(machine.last.start, gpa + 2 * MIB);
    SAME(machine.last.bytes, 2 * MIB);
    SAME(machine.last.vmid, 7);
    /* Completed once; a second time costs nothing. */
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    SAME(machine.invalidations, before + 1);
    /* A write fault of the log invalidates on this CPU only. */
    owing = slat_relax(&space, gpa + 2 * MIB + 4 * KIB, 4 * KIB, SLAT_ACCESS_WRITE);
    SAME(owing.result.done, 4 * KIB);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    SAME(machine.local, 1);
    SAME(machine.last.start, gpa + 2 * MIB + 4 * KIB);
    SAME(machine.last.bytes, 4 * KIB);
    SAME(machine.invalidations, before + 1);
    SAME(walk(&machine, &space, gpa + 2 * MIB + 4 * KIB, 0) & (1 << 7), 1 << 7);

    /* What is lost joins what the space owes: the next call that completes covers it. */
    before = machine.invalidations;
    owing = slat_write_protect(&space, gpa, 4 * KIB);
    SAME(owing.result.done, 4 * KIB);
    done = slat_map(&space, gpa + 12 * KIB, 4 * KIB, 0x90000000, ram(), 4 * KIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(machine.invalidations, before + 1);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    SAME(machine.invalidations, before + 1);

    /* A dirty log by hardware: every page that is dirty, once; then one that "hardware" wrote. */
    memset(dirty, 0, sizeof(dirty));
    done = slat_harvest(&space, gpa + 4 * KIB, 8 * KIB, dirty, 8);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(dirty[0], 2);
    SAME(done.done, 1);
    owing = slat_clean(&space, gpa + 8 * KIB, 4 * KIB);
    SAME(owing.result.status, SLAT_STATUS_OK);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    memset(dirty, 0, sizeof(dirty));
    {
        uint64_t unanswered[8];

        memset(unanswered, 0, sizeof(unanswered));
        owing = slat_age(&space, gpa, 16 * KIB, SLAT_AGE_CLEAR, dirty, unanswered, 8);
        SAME(owing.result.done, 3);
        SAME(dirty[0], 13);
        SAME(unanswered[0], 0);
        SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    }

    /* Back into a block: the whole table as it was. */
    owing = slat_relax(&space, gpa + 2 * MIB, 2 * MIB, SLAT_ACCESS_WRITE);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    owing = slat_collapse(&space, gpa + 2 * MIB, 2 * MIB, 2 * MIB);
    SAME(owing.result.done, 2 * MIB);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    SAME(walk(&machine, &space, gpa + 2 * MIB, 0), 0x00080000802007fdull);

    /* Rights that are exactly these; a block that the range cuts is split. */
    done = slat_protect(&space, gpa + 3 * MIB, 4 * KIB,
                        attributes(SLAT_READ, SLAT_EXECUTE_NONE, SLAT_MEMORY_NORMAL));
    SAME(done.done, 4 * KIB);
    SAME(walk(&machine, &space, gpa + 3 * MIB, 0), 0x024000008030077full);

    /* Unmapped in runs, once nobody reaches the memory. */
    memset(&heap, 0, sizeof(heap));
    heap.space = &space;
    before = machine.invalidations;
    done = slat_unmap(&space, gpa + 2 * MIB, 2 * MIB, take, &heap);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(heap.bytes, 2 * MIB);
    SAME(heap.runs, 3);
    SAME(heap.last.hpa, 0x80301000);
    SAME(heap.last.leaf, 4 * KIB);
    CHECK(machine.invalidations > before);
    SAME(slat_query(&space, gpa + 2 * MIB, &found), SLAT_STATUS_NOT_MAPPED);
    done = slat_unmap_leaf(&space, 5 * MIB, &leaf);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(leaf.gpa, 0);
    SAME(leaf.hpa, 0x140000000ull);
    SAME(leaf.bytes, GIB);
    done = slat_unmap_leaf(&space, 5 * MIB, &leaf);
    SAME(done.status, SLAT_STATUS_NOT_MAPPED);

    SAME(slat_destroy(&space), SLAT_STATUS_OK);
    SAME(slat_destroy(&space), SLAT_STATUS_HANDLE);

    /* A platform without a local invalidation invalidates on every CPU. */
    platform.invalidate_local = NULL;
    SAME(slat_create(&space, &platform, &format, 7, 40), SLAT_STATUS_OK);
    done = slat_map(&space, gpa, 4 * KIB, 0x80000000, ram(), 4 * KIB);
    SAME(done.status, SLAT_STATUS_OK);
    before = machine.invalidations;
    machine.local = 0;
    owing = slat_relax(&space, gpa, 4 * KIB, SLAT_ACCESS_WRITE);
    SAME(owing.owed.ticket, 0);
    SAME(machine.invalidations - before, 1);
    SAME(machine.local, 0);
    SAME(slat_destroy(&space), SLAT_STATUS_OK);
    off(&machine);
}

static void ept(void)
{
    static struct slat_space space;
    struct machine machine;
    struct slat_platform platform = on(&machine, SLAT_BREAK_BEFORE_MAKE_NEVER);
    struct slat_format format;
    struct slat_geometry root;
    struct slat_result done;
    struct slat_owing owing;
    uint64_t pointer = 0;

    SAME(slat_default_format(SLAT_FORMAT_KIND_EPT1G, &format), SLAT_STATUS_OK);
    SAME(slat_create(&space, &platform, &format, 1, 48), SLAT_STATUS_OK);
    /* SDM 3C: a walk of four levels 3 << 3, write-back 6, accessed and dirty flags bit 6. */
    SAME(slat_root(&space, &root), SLAT_STATUS_OK);
    SAME(slat_root_register(&space, &pointer), SLAT_STATUS_OK);
    SAME(pointer, root.root | 0x5e);
    /* RWX 7, write-back 6 << 3, IPAT bit 6, accessed bit 8, dirty bit 9; a large page: bit 7. */
    done = slat_map(&space, 4 * KIB, 4 * KIB, 0x123456000ull, ram(), 4 * KIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, 4 * KIB, 1), 0x123456377ull);
    done = slat_map(&space, 2 * MIB, 2 * MIB, 0x123400000ull, ram(), GIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, 2 * MIB, 1), 0x1234003f7ull);
    done = slat_map(&space, GIB, GIB, 0x140000000ull, ram(), GIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, GIB, 1), 0x1400003f7ull);
    done = slat_map(&space, 8 * KIB, 4 * KIB, 0x5000,
                    attributes(SLAT_READ | SLAT_WRITE, SLAT_EXECUTE_ALL, SLAT_MEMORY_NORMAL),
                    4 * KIB);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(walk(&machine, &space, 8 * KIB, 1), 0x5077);
    owing = slat_write_protect(&space, 2 * MIB, 2 * MIB);
    SAME(owing.result.done, 2 * MIB);
    SAME(walk(&machine, &space, 2 * MIB, 1), 0x1234003f5ull);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    /* x86 splits without a break: nothing is invalidated but what is owed. */
    machine.invalidations = 0;
    owing = slat_split(&space, 2 * MIB, 2 * MIB, 4 * KIB);
    SAME(owing.result.done, 2 * MIB);
    SAME(machine.invalidations, 0);
    SAME(walk(&machine, &space, 2 * MIB + 4 * KIB, 1), 0x123401375ull);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    SAME(machine.invalidations, 1);
    SAME(slat_destroy(&space), SLAT_STATUS_OK);
    off(&machine);
}

static void refusals(void)
{
    static struct slat_space space, other, copy;
    struct machine machine;
    struct slat_platform platform = on(&machine, SLAT_BREAK_BEFORE_MAKE_ALWAYS), missing;
    struct slat_format format;
    struct slat_translation found;
    struct slat_unmapped_run leaf;
    struct slat_result done;
    struct slat_owing owing;
    uint64_t value;

    SAME(slat_default_format(99, &format), SLAT_STATUS_ARGUMENT);
    SAME(slat_default_format(SLAT_FORMAT_KIND_ARM64_K4, NULL), SLAT_STATUS_NULL_POINTER);
    SAME(slat_default_format(SLAT_FORMAT_KIND_ARM64_K4, &format), SLAT_STATUS_OK);
    /* Not made yet. */
    SAME(slat_query(&space, 0, &found), SLAT_STATUS_HANDLE);
    SAME(slat_destroy(&space), SLAT_STATUS_HANDLE);
    SAME(slat_destroy(NULL), SLAT_STATUS_NULL_POINTER);
    SAME(slat_create(NULL, &platform, &format, 1, 40), SLAT_STATUS_NULL_POINTER);
    SAME(slat_create(&space, NULL, &format, 1, 40), SLAT_STATUS_NULL_POINTER);
    SAME(slat_create(&space, &platform, NULL, 1, 40), SLAT_STATUS_NULL_POINTER);
    missing = platform;
    missing.invalidate = NULL;
    SAME(slat_create(&space, &missing, &format, 1, 40), SLAT_STATUS_NULL_POINTER);
    missing = platform;
    missing.break_before_make = 3;
    SAME(slat_create(&space, &missing, &format, 1, 40), SLAT_STATUS_ARGUMENT);
    SAME(slat_create(&space, &platform, &format, 1, 64), SLAT_STATUS_ADDRESS_BITS);
    machine.left = 0;
    SAME(slat_create(&space, &platform, &format, 1, 40), SLAT_STATUS_OUT_OF_FRAMES);
    machine.left = ARENA_FRAMES;
    SAME(slat_create(&space, &platform, &format, 1, 40), SLAT_STATUS_OK);
    SAME(slat_create(&other, &platform, &format, 2, 40), SLAT_STATUS_OK);
    /* Live already; and a copy is not the handle. */
    SAME(slat_create(&space, &platform, &format, 1, 40), SLAT_STATUS_HANDLE);
    memcpy(&copy, &space, sizeof(copy));
    SAME(slat_query(&copy, 0, &found), SLAT_STATUS_HANDLE);

    done = slat_map(&space, 5, 4 * KIB, 0, ram(), 4 * KIB);
    SAME(done.status, SLAT_STATUS_RANGE);
    done = slat_map(&space, 0, 0, 0, ram(), 4 * KIB);
    SAME(done.status, SLAT_STATUS_RANGE);
    done = slat_map(&space, 0, 4 * KIB, 5, ram(), 4 * KIB);
    SAME(done.status, SLAT_STATUS_HOST_ADDRESS);
    done = slat_map(&space, 0, 4 * KIB, 0, ram(), 5);
    SAME(done.status, SLAT_STATUS_ARGUMENT);
    done = slat_map(&space, 0, 4 * KIB, 0, ram(), 8 * KIB);
    SAME(done.status, SLAT_STATUS_LEAF_SIZE);
    done = slat_map(&space, 0, 4 * KIB, 0, attributes(1 << 30, SLAT_EXECUTE_ALL,
                                                      SLAT_MEMORY_NORMAL), 4 * KIB);
    SAME(done.status, SLAT_STATUS_ARGUMENT);
    done = slat_map(&space, 0, 4 * KIB, 0, attributes(SLAT_READ | SLAT_WRITE, SLAT_EXECUTE_ALL,
                                                      SLAT_MEMORY_NORMAL), 4 * KIB);
    SAME(done.status, SLAT_STATUS_ATTRIBUTES);
    done = slat_map(&space, 0, 2 * MIB, 0x80000000, ram(), 2 * MIB);
    SAME(done.status, SLAT_STATUS_OK);
    done = slat_map(&space, 0, 4 * KIB, 0x90000000, ram(), 4 * KIB);
    SAME(done.status, SLAT_STATUS_OCCUPIED);
    owing = slat_write_protect(&space, 0, 4 * KIB);
    SAME(owing.result.status, SLAT_STATUS_CUTS_BLOCK);
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);
    owing = slat_relax(&space, 0, 4 * KIB, 17);
    SAME(owing.result.status, SLAT_STATUS_ARGUMENT);
    owing = slat_age(&space, 0, 4 * KIB, 0, &value, &value, 1);
    SAME(owing.result.status, SLAT_STATUS_ARGUMENT);
    value = 0;
    done = slat_harvest(&space, 0, 2 * MIB, &value, 1);
    SAME(done.status, SLAT_STATUS_BITMAP);
    done = slat_harvest(&space, 0, 2 * MIB, NULL, 8);
    SAME(done.status, SLAT_STATUS_NULL_POINTER);
    done = slat_unmap(&space, 0, 2 * MIB, NULL, NULL);
    SAME(done.status, SLAT_STATUS_NULL_POINTER);
    done = slat_unmap_leaf(&space, 0, NULL);
    SAME(done.status, SLAT_STATUS_NULL_POINTER);
    SAME(slat_query(&space, 0, NULL), SLAT_STATUS_NULL_POINTER);
    SAME(slat_root_register(&space, &value), SLAT_STATUS_UNSUPPORTED);
    /* Nothing of it was done. */
    SAME(slat_query(&space, 0, &found), SLAT_STATUS_OK);
    SAME(found.attributes.flags, SLAT_RAM);
    /* A block that cannot be split for want of a table stays as it is. */
    machine.left = 0;
    owing = slat_split(&space, 0, 4 * KIB, 4 * KIB);
    SAME(owing.result.status, SLAT_STATUS_OUT_OF_FRAMES);
    SAME(owing.result.at, 0);
    machine.left = ARENA_FRAMES - 8;

    /* An obligation goes to the space that it is of; and one that was made up to none. */
    owing = slat_write_protect(&space, 0, 2 * MIB);
    SAME(owing.result.status, SLAT_STATUS_OK);
    SAME(slat_complete(&other, owing.owed), SLAT_STATUS_FOREIGN);
    owing.owed.ticket += 1;
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_ARGUMENT);
    owing.owed.ticket -= 1;
    SAME(slat_complete(&space, owing.owed), SLAT_STATUS_OK);

    done = slat_unmap_leaf(&space, 0, &leaf);
    SAME(done.status, SLAT_STATUS_OK);
    SAME(slat_destroy(&space), SLAT_STATUS_OK);
    SAME(slat_query(&space, 0, &found), SLAT_STATUS_HANDLE);
    /* The storage may hold another. */
    SAME(slat_create(&space, &platform, &format, 3, 40), SLAT_STATUS_OK);
    SAME(slat_destroy(&space), SLAT_STATUS_OK);
    SAME(slat_destroy(&other), SLAT_STATUS_OK);
    free(machine.arena);
}

/* Counts what an EL2 would execute. */
static void count(void *context, enum slat_tlbi instruction, uint64_t operand)
{
    unsigned *counts = (unsigned *)context;

    counts[instruction]++;
    if (instruction == SLAT_TLBI_IPAS2LE1IS)
        SAME(operand, 0x40000);
}

static void registers(void)
{
    static struct slat_space space;
    /* 40-bit addresses (2), 4K granule; FEAT_HAFDBS with dirty state (2); FEAT_BBM level 2. */
    struct slat_arm64_id id = { 0x2, 0x2, 2ull << 52, 0, 0 };
    struct slat_invalidation page = { 0x40000000, 0x1000, 0x1000, 5, false };
    struct machine machine;
    struct slat_platform platform = on(&machine, SLAT_BREAK_BEFORE_MAKE_ALWAYS);
    struct slat_format format;
    struct slat_geometry root;
    unsigned counts[SLAT_TLBI_VMALLS12E1 + 1];
    uint64_t vttbr = 0, vtcr = 0;
    uint32_t changes = 9;

    SAME(slat_arm64_break_before_make(&id, false, &changes), SLAT_STATUS_OK);
    SAME(changes, SLAT_BREAK_BEFORE_MAKE_ALWAYS);
    SAME(slat_arm64_break_before_make(&id, true, &changes), SLAT_STATUS_OK);
    SAME(changes, SLAT_BREAK_BEFORE_MAKE_CONFLICT_HANDLED);
    SAME(slat_arm64_format(&id, SLAT_FORMAT_KIND_ARM64_LPA2_K4, &format),
         SLAT_STATUS_UNSUPPORTED);
    SAME(slat_arm64_format(&id, SLAT_FORMAT_KIND_EPT1G, &format), SLAT_STATUS_ARGUMENT);
    SAME(slat_arm64_format(&id, SLAT_FORMAT_KIND_ARM64_K4, &format), SLAT_STATUS_OK);
    SAME(format.flags, SLAT_FORMAT_HARDWARE_DIRTY);
    SAME(format.output_bits, 40);
    SAME(slat_create(&space, &platform, &format, 5, 40), SLAT_STATUS_OK);
    SAME(slat_arm64_registers(&space, &id, &vttbr, &vtcr), SLAT_STATUS_OK);
    SAME(slat_root(&space, &root), SLAT_STATUS_OK);
    /* VMID in 63:48. T0SZ is 64 - 40 in 5:0; PS 2, 40 bits, in 18:16; HD is bit 22, HA 21. */
    SAME(vttbr, 5ull << 48 | root.root);
    SAME(vtcr & 0x3f, 24);
    SAME(vtcr >> 16 & 7, 2);
    SAME(vtcr >> 21 & 3, 3);
    memset(counts, 0, sizeof(counts));
    SAME(slat_arm64_tlbi(&id, SLAT_FORMAT_KIND_ARM64_K4, &page, count, counts), SLAT_STATUS_OK);
    SAME(counts[SLAT_TLBI_IPAS2LE1IS], 1);
    SAME(counts[SLAT_TLBI_VMALLE1IS], 1);
    CHECK(counts[SLAT_TLBI_DSB_ISH] >= 2 && counts[SLAT_TLBI_ISB] == 1);
    memset(counts, 0, sizeof(counts));
    SAME(slat_arm64_tlbi_local(&id, SLAT_FORMAT_KIND_ARM64_K4, &page, count, counts),
         SLAT_STATUS_OK);
    SAME(counts[SLAT_TLBI_IPAS2LE1], 1);
    SAME(counts[SLAT_TLBI_VMALLE1], 1);
    SAME(counts[SLAT_TLBI_IPAS2LE1IS] + counts[SLAT_TLBI_VMALLE1IS] + counts[SLAT_TLBI_DSB_ISH], 0);
    SAME(slat_destroy(&space), SLAT_STATUS_OK);
    off(&machine);
}

int main(void)
{
    arm64();
    ept();
    registers();
    refusals();
    if (failures != 0) {
        printf("%u wrong\n", failures);
        return EXIT_FAILURE;
    }
    printf("all entries are those of the manuals\n");
    return EXIT_SUCCESS;
}
