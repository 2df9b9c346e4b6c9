/*
 * One guest's tables, kept by the tree's code, at the other end of a pipe.
 *
 * A line in, a line out. Numbers are decimal or 0x...; addresses and sizes are bytes.
 *
 *   arena BYTES                     memory for tables; first of all; finds the bytes in huge pages
 *   reset                           empty tables
 *   build START SIZE PHYS LEAF PROT maps by leaves of LEAF bytes in tables that nobody else walks, 32 MiB
 *                                   a walk where these are pages; topping the cache up is included;
 *                                   PROT: 1 execute, 2 write, 4 read
 *   warm BYTES | cool BYTES         the first BYTES of table memory into the caches, or out of them
 *   map START SIZE PHYS LEAF PROT   a fault for each leaf; table pages are at hand; finds how many are to be tried again
 *   unmap START SIZE
 *   split START SIZE CHUNK          as logging is enabled; topping the cache up is included
 *   protect START SIZE
 *   clear START SIZE MASK CHUNK     64 pages at a time, those of MASK; split by CHUNK unless 0
 *   age START SIZE EACH             test and clear, in one walk or page by page
 *   relax START SIZE PROT           a permission fault on each page; finds how many are to be tried again
 *   young START SIZE                an access fault on each page
 *   addresses COUNT                 then COUNT addresses of 8 bytes, to be looked up
 *   lookup                          looks them up
 *   flush START SIZE
 *   leaves START SIZE               prints runs, then a line that ends them
 *
 * Answers: "ok SECONDS found=NUMBER name=value...", "refused ERRNO" of the tree's own error, or of no memory, "broken WHERE" where
 * it warned, "error TEXT" for a line that cannot be right.
 */
#define _GNU_SOURCE
#include "callers.h"
#include "machine.h"
#include <signal.h>
#include <stdio.h>
#include <time.h>

/* The system's own header asks for kernel headers that `shim` stands in for. */
int prctl(int option, ...);
#define PR_SET_PDEATHSIG 1

#ifndef SLAT_FAULT_FLAGS
#define SLAT_FAULT_FLAGS KVM_PGTABLE_WALK_SHARED
#endif

static struct kvm kvm;
static struct kvm_pgtable tables;
static struct kvm_mmu_memory_cache cache = { .gfp_zero = __GFP_ZERO };
static bool by_pages;
/* S2AP[1] of a leaf descriptor: it may be written. */
#define S2AP_WRITE (1ULL << 7)
static u64 *addresses, address_count;
/* What a command found. */
static u64 found;

static bool force_pages(u64 addr, u64 end, enum kvm_pgtable_prot prot)
{
	(void)addr, (void)end, (void)prot;
	return by_pages;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static int reset(void)
{
	struct kvm_s2_mmu *mmu = &kvm.arch.mmu;

	free(cache.objects);
	free(mmu->split_page_cache.objects);
	memset(&kvm, 0, sizeof(kvm));
	memset(&tables, 0, sizeof(tables));
	cache = (struct kvm_mmu_memory_cache){ .gfp_zero = __GFP_ZERO };
	mmu->split_page_cache.gfp_zero = __GFP_ZERO;
	machine_reset();
	int levels = stage2_pgtable_levels(SLAT_IPA_BITS);
	mmu->vtcr = VTCR_EL2_FLAGS | (64 - SLAT_IPA_BITS) | VTCR_EL2_LVLS_TO_SL0(levels < 2 ? 2 : levels);
	kvm.arch.vtcr = mmu->vtcr;
	mmu->arch = &kvm.arch;
	mmu->pgt = &tables;
	return __kvm_pgtable_stage2_init(&tables, mmu, &machine_mm_ops, 0, force_pages);
}

/* PROT of the protocol as the tree's, which numbers its bits as it likes. */
static enum kvm_pgtable_prot prot_of(u64 prot)
{
	return (prot & 1 ? KVM_PGTABLE_PROT_X : 0) | (prot & 2 ? KVM_PGTABLE_PROT_W : 0) |
	       (prot & 4 ? KVM_PGTABLE_PROT_R : 0);
}

/* Table pages for so many bytes by leaves of `leaf`, of which there are at hand as many as can be. */
static int top_up(u64 size, u64 leaf)
{
	u64 table = leaf * PTRS_PER_PTE;
	u64 needed = DIV_ROUND_UP(size, table) + DIV_ROUND_UP(size, table * PTRS_PER_PTE) + 4;

	return __kvm_mmu_topup_memory_cache(&cache, needed, needed);
}

static int map_each(u64 start, u64 size, u64 phys, u64 leaf, enum kvm_pgtable_prot prot,
		    enum kvm_pgtable_walk_flags flags)
{
	for (u64 at = 0; at < size; at += leaf) {
		int ret = kvm_pgtable_stage2_map(&tables, start + at, leaf, phys + at, prot, &cache, flags);

		if (ret && ret != -EAGAIN)
			return ret;
		found += ret == -EAGAIN;
	}
	return 0;
}

static int build(u64 start, u64 size, u64 phys, u64 leaf, enum kvm_pgtable_prot prot)
{
	u64 step = leaf == PAGE_SIZE ? max(PMD_SIZE, 32UL << 20) : leaf;
	int ret = 0, needed = DIV_ROUND_UP(step, PMD_SIZE) + 4;

	by_pages = leaf == PAGE_SIZE;
	for (u64 at = 0; at < size && !ret; at += step) {
		ret = __kvm_mmu_topup_memory_cache(&cache, needed, needed);
		if (!ret)
			ret = kvm_pgtable_stage2_map(&tables, start + at, min(step, size - at), phys + at, prot,
						     &cache,
						     KVM_PGTABLE_WALK_SKIP_BBM_TLBI |
							     KVM_PGTABLE_WALK_SKIP_CMO);
	}
	by_pages = false;
	return ret;
}

/* The word of the log that begins there: its pages that `mask` names. */
static void clear_word(u64 start, u64 mask)
{
	struct kvm_memory_slot slot = { .base_gfn = start >> PAGE_SHIFT, .npages = 64 };

	kvm_arch_mmu_enable_log_dirty_pt_masked(&kvm, &slot, 0, mask);
}

static int clear(u64 start, u64 size, u64 mask, u64 chunk)
{
	kvm.manual_protect_and_init_set = chunk != 0;
	for (u64 at = start; at < start + size; at += 64 * PAGE_SIZE)
		clear_word(at, mask);
	return 0;
}

static int age(u64 start, u64 size, u64 each)
{
	u64 step = each ? PAGE_SIZE : size;

	found = 0;
	for (u64 at = start; at < start + size; at += step)
		found += kvm_pgtable_stage2_test_clear_young(&tables, at, step, true);
	return 0;
}

typedef int relax_old(struct kvm_pgtable *, u64, enum kvm_pgtable_prot);
typedef int relax_new(struct kvm_pgtable *, u64, enum kvm_pgtable_prot, enum kvm_pgtable_walk_flags);

static int relax(u64 start, u64 size, u64 prot)
{
	void *function = (void *)kvm_pgtable_stage2_relax_perms;
	const bool old = __builtin_types_compatible_p(__typeof__(kvm_pgtable_stage2_relax_perms), relax_old);
	_Static_assert(__builtin_types_compatible_p(__typeof__(kvm_pgtable_stage2_relax_perms), relax_old) ||
			       __builtin_types_compatible_p(__typeof__(kvm_pgtable_stage2_relax_perms), relax_new),
		       "kvm_pgtable_stage2_relax_perms takes what is not known");

	for (u64 at = start; at < start + size; at += PAGE_SIZE) {
		int ret = old ? ((relax_old *)function)(&tables, at, prot_of(prot)) :
				  ((relax_new *)function)(&tables, at, prot_of(prot), SLAT_FAULT_FLAGS);

		if (ret && ret != -EAGAIN)
			return ret;
		found += ret == -EAGAIN;
	}
	return 0;
}

typedef kvm_pte_t young_old(struct kvm_pgtable *, u64);
typedef void young_new(struct kvm_pgtable *, u64, enum kvm_pgtable_walk_flags);

static int young(u64 start, u64 size)
{
	void *function = (void *)kvm_pgtable_stage2_mkyoung;
	const bool old = __builtin_types_compatible_p(__typeof__(kvm_pgtable_stage2_mkyoung), young_old);
	_Static_assert(__builtin_types_compatible_p(__typeof__(kvm_pgtable_stage2_mkyoung), young_old) ||
			       __builtin_types_compatible_p(__typeof__(kvm_pgtable_stage2_mkyoung), young_new),
		       "kvm_pgtable_stage2_mkyoung takes what is not known");

	for (u64 at = start; at < start + size; at += PAGE_SIZE) {
		if (old)
			((young_old *)function)(&tables, at);
		else
			((young_new *)function)(&tables, at, SLAT_FAULT_FLAGS);
	}
	return 0;
}

/* The level is of a type that differs by tree; its low byte is the same in all. */
static int lookup(void)
{
	kvm_pte_t pte;
	int level = 0;

	found = 0;
	for (u64 i = 0; i < address_count; i++) {
		int ret = kvm_pgtable_get_leaf(&tables, addresses[i], &pte, (void *)&level);

		if (ret)
			return ret;
		u64 offset = kvm_granule_size(level) - 1;
		found += (kvm_pte_to_phys(pte) & ~offset) + (addresses[i] & offset);
		found += !!(pte & S2AP_WRITE);
	}
	return 0;
}

/* ---- what stands in the tables, by the manual and not by the tree's own macros ---- */

#define VALID 1ULL
#define TABLE 2ULL
#define ADDRESS ((1ULL << 48) - PAGE_SIZE)

/* Leaves whose descriptors ascend by their own size are one run. */
static struct { u64 start, size, raw, count; } run;

static void end_run(void)
{
	if (run.count)
		printf("%llx %llx %llx %llx\n", run.start, run.size, run.raw, run.count);
	run.count = 0;
}

static void leaf(u64 at, u64 size, u64 raw)
{
	if (run.count && run.size == size && at == run.start + run.count * size &&
	    raw == run.raw + run.count * size) {
		run.count++;
		return;
	}
	end_run();
	run.start = at, run.size = size, run.raw = raw, run.count = 1;
}

static void table_leaves(const u64 *table, u64 slots, u64 base, int level, u64 start, u64 end)
{
	u64 size = 1ULL << ARM64_HW_PGTABLE_LEVEL_SHIFT(level);

	for (u64 slot = 0; slot < slots; slot++) {
		u64 at = base + slot * size, raw = table[slot];

		if (at >= end || at + size <= start || !(raw & VALID))
			continue;
		if (level == 3 || !(raw & TABLE))
			leaf(at, size, raw);
		else
			table_leaves(machine_table(raw & ADDRESS), PTRS_PER_PTE, at, level + 1, start, end);
	}
}

static void leaves(u64 start, u64 size)
{
	int level = tables.start_level;
	u64 slots = 1ULL << (SLAT_IPA_BITS - ARM64_HW_PGTABLE_LEVEL_SHIFT(level));

	table_leaves((const u64 *)tables.pgd, slots, 0, level, start, start + size);
	end_run();
	printf("end\n");
}

/* ---- the pipe ---- */

static bool read_addresses(u64 count)
{
	free(addresses);
	addresses = malloc(count * sizeof(u64));
	address_count = count;
	if (!addresses)
		return false;
	if (fread(addresses, sizeof(u64), count, stdin) != count)
		exit(4);
	return true;
}

static void answer(int ret, double seconds)
{
	if (ret) {
		printf("refused %d\n", -ret);
		return;
	}
	struct slat_counts *c = &slat_counts;
	printf("ok %.9f found=%llu", seconds, found);
#ifdef SLAT_COUNT
	/* A visit reads its entry once; it reads it again after a callback. */
	printf(" visits=%llu callbacks=%llu tlbis=%llu barriers=%llu pages=%llu cache_calls=%llu "
	       "cache_bytes=%llu",
	       c->visits, c->loads - c->visits, c->tlbis, c->barriers, c->pages, c->cache_calls,
	       c->cache_bytes);
#endif
	(void)c;
	printf(" tables=%llu\n", machine_used());
}

/* An operation, by its numbers; what it may refuse is the tree's. */
static int do_build(const u64 *n) { return build(n[0], n[1], n[2], n[3], prot_of(n[4])); }
static int do_map(const u64 *n) { return map_each(n[0], n[1], n[2], n[3], prot_of(n[4]), SLAT_FAULT_FLAGS); }
static int do_unmap(const u64 *n) { return slat_unmap(&kvm, n[0], n[0] + n[1]); }
static int do_split(const u64 *n) { return slat_split(&kvm, n[0], n[0] + n[1]); }
static int do_protect(const u64 *n) { return slat_protect(&kvm, n[0], n[0] + n[1]), 0; }
static int do_clear(const u64 *n) { return clear(n[0], n[1], n[2], n[3]); }
static int do_age(const u64 *n) { return age(n[0], n[1], n[2]); }
static int do_relax(const u64 *n) { return relax(n[0], n[1], n[2]); }
static int do_young(const u64 *n) { return young(n[0], n[1]); }
static int do_lookup(const u64 *n) { return (void)n, lookup(); }
static int do_flush(const u64 *n) { return slat_flush(&kvm, n[0], n[0] + n[1]); }

static int do_reset(const u64 *n) { return (void)n, reset(); }
static int do_warm(const u64 *n) { return machine_warm(n[0]), 0; }
static int do_cool(const u64 *n) { return machine_cool(n[0]), 0; }
/* It finds how many bytes huge pages back. */
static int do_arena(const u64 *n)
{
	if (!machine_begin(n[0]))
		return -ENOMEM;
	found = machine_huge();
	return 0;
}
static int do_addresses(const u64 *n) { return read_addresses(n[0]) ? 0 : -ENOMEM; }

static const struct command {
	const char *name;
	int numbers;
	int (*function)(const u64 *n);
	bool is_timed;
	/* Which of the numbers is the chunk of splits, or -1. */
	int chunk;
} commands[] = {
	{ "arena", 1, do_arena },	  { "reset", 0, do_reset },
	{ "warm", 1, do_warm },		  { "cool", 1, do_cool },
	{ "addresses", 1, do_addresses }, { "leaves", 2, NULL },
	{ "build", 5, do_build, true, -1 },   { "map", 5, do_map, true, -1 },
	{ "unmap", 2, do_unmap, true, -1 },   { "split", 3, do_split, true, 2 },
	{ "protect", 2, do_protect, true, -1 }, { "clear", 4, do_clear, true, 3 },
	{ "age", 3, do_age, true, -1 },	      { "relax", 3, do_relax, true, -1 },
	{ "young", 2, do_young, true, -1 },   { "lookup", 0, do_lookup, true, -1 },
	{ "flush", 2, do_flush, true, -1 },
};

static int timed(const struct command *command, const u64 *n, double *seconds)
{
	struct kvm_s2_mmu *mmu = &kvm.arch.mmu;
	int ret = command->function == do_map ? top_up(n[1], n[3]) : 0;

	if (ret)
		return ret;
	mmu->split_page_chunk_size = command->chunk < 0 ? 0 : n[command->chunk];
	memset(&slat_counts, 0, sizeof(slat_counts));
	double begin = now();
	ret = command->function(n);
	*seconds = now() - begin;
	if (mmu->split_page_cache.objects)
		kvm_mmu_free_memory_cache(&mmu->split_page_cache);
	if (cache.objects)
		kvm_mmu_free_memory_cache(&cache);
	return ret;
}

static void obey(char *line)
{
	char *rest, *name = strtok_r(line, " \n", &rest), *word;
	const struct command *command = NULL;
	u64 n[5] = { 0 };
	int count = 0;
	double seconds = 0;

	for (size_t i = 0; name && i < ARRAY_SIZE(commands); i++)
		if (!strcmp(commands[i].name, name))
			command = &commands[i];
	while (count < 5 && (word = strtok_r(NULL, " \n", &rest)))
		n[count++] = strtoull(word, NULL, 0);
	if (!command || count != command->numbers) {
		printf("error no such command\n");
		return;
	}
	found = 0;
	if (!command->function) {
		leaves(n[0], n[1]);
		return;
	}
	int ret = command->is_timed ? timed(command, n, &seconds) : command->function(n);

	answer(ret, seconds);
}

int main(void)
{
	char line[256];

	/* A walk that never ends must not outlive who asked for it. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);

	while (fgets(line, sizeof(line), stdin)) {
		obey(line);
		fflush(stdout);
	}
	return 0;
}
