/*
 * Table memory: one run of pages, touched and backed by huge pages where the host gives them, handed
 * out from its start and reused last in, first out. Each page has a reference count that changes
 * atomically, as the kernel's do.
 */
#define _GNU_SOURCE
#include "machine.h"
#include <stdio.h>
#include <sys/mman.h>

#define HUGE_PAGE (2UL << 20)
/* Where the memory stands in the made-up physical address space. */
#define PHYS_BASE (2ULL << 30)

/* As large as the kernel's struct page. */
struct page {
	int count;
	int next_free;
	char unused[56];
};

static char *memory;
static struct page *pages;
static u64 capacity, used, taken;
static int first_free = -1;

struct slat_counts slat_counts;

void slat_broken(const char *what, const char *file, int line)
{
	printf("broken %s, %s:%d\n", what, file, line);
	fflush(stdout);
	exit(3);
}

static void *map_memory(u64 bytes)
{
	char *at = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		return NULL;
	at = (char *)ALIGN((unsigned long)at, HUGE_PAGE);
	madvise(at, bytes, MADV_HUGEPAGE);
	memset(at, 1, bytes);
	return at;
}

bool machine_begin(u64 bytes)
{
	capacity = ALIGN(bytes, HUGE_PAGE) >> PAGE_SHIFT;
	memory = map_memory(capacity << PAGE_SHIFT);
	pages = map_memory(ALIGN(capacity * sizeof(struct page), HUGE_PAGE));
	return memory && pages;
}

void machine_reset(void)
{
	used = taken = 0;
	first_free = -1;
}

u64 machine_used(void)
{
	return taken << PAGE_SHIFT;
}

u64 machine_huge(void)
{
	FILE *smaps = fopen("/proc/self/smaps_rollup", "r");
	char line[128];
	u64 kilobytes = 0;

	while (smaps && fgets(line, sizeof(line), smaps))
		sscanf(line, "AnonHugePages: %llu", &kilobytes);
	if (smaps)
		fclose(smaps);
	return kilobytes << 10;
}

void machine_warm(u64 bytes)
{
	u64 sum = 0;

	bytes = min(bytes, capacity << PAGE_SHIFT);
	for (u64 at = 0; at < bytes; at += 64)
		sum += *(volatile u64 *)(memory + at);
	for (u64 page = 0; page < bytes >> PAGE_SHIFT; page++)
		sum += *(volatile int *)&pages[page].count;
}

static void drive_out(const void *start, u64 bytes)
{
#if defined(__x86_64__)
	for (u64 at = 0; at < bytes; at += 64)
		__builtin_ia32_clflush((const char *)start + at);
	__builtin_ia32_mfence();
#elif defined(__aarch64__)
	for (u64 at = 0; at < bytes; at += 64)
		__asm__ volatile("dc civac, %0" : : "r"((const char *)start + at) : "memory");
	__asm__ volatile("dsb ish" ::: "memory");
#else
#error "no way to drive memory out of the caches is known for this architecture"
#endif
}

void machine_cool(u64 bytes)
{
	bytes = min(bytes, capacity << PAGE_SHIFT);
	drive_out(memory, bytes);
	drive_out(pages, (bytes >> PAGE_SHIFT) * sizeof(struct page));
}

u64 *machine_table(u64 phys)
{
	u64 offset = phys - PHYS_BASE;

	return offset < capacity << PAGE_SHIFT ? (u64 *)(memory + offset) : NULL;
}

static struct page *page_of(const void *address)
{
	return &pages[((const char *)address - memory) >> PAGE_SHIFT];
}

static void *take(u64 count)
{
	u64 page;

	if (count == 1 && first_free >= 0) {
		page = first_free;
		first_free = pages[page].next_free;
	} else {
		/* Several pages begin at a multiple of their size, as a root must. */
		page = ALIGN(used, count);
		if (page + count > capacity)
			return NULL;
		used = page + count;
	}
	for (u64 i = 0; i < count; i++)
		pages[page + i].count = 1;
	taken += count;
	SLAT_ADD(pages, count);
	return memory + (page << PAGE_SHIFT);
}

unsigned long __get_free_page(gfp_t flags)
{
	void *page = take(1);

	if (page && (flags & __GFP_ZERO))
		memset(page, 0, PAGE_SIZE);
	return (unsigned long)page;
}

void free_page(unsigned long address)
{
	struct page *page = page_of((void *)address);

	page->next_free = first_free;
	first_free = page - pages;
	taken--;
}

static void *zalloc_page(void *cache)
{
	return kvm_mmu_memory_cache_alloc(cache);
}

static void *zalloc_pages_exact(size_t size)
{
	void *start = take(DIV_ROUND_UP(size, PAGE_SIZE));

	return start ? memset(start, 0, size) : NULL;
}

static void free_pages_exact(void *address, size_t size)
{
	(void)address;
	(void)size;
}

static void get_page(void *address)
{
	__atomic_add_fetch(&page_of(address)->count, 1, __ATOMIC_RELAXED);
}

static void put_page(void *address)
{
	struct page *page = page_of(address);

	if (__atomic_sub_fetch(&page->count, 1, __ATOMIC_ACQ_REL) == 0)
		free_page((unsigned long)(memory + ((page - pages) << PAGE_SHIFT)));
}

static int page_count(void *address)
{
	return __atomic_load_n(&page_of(address)->count, __ATOMIC_RELAXED);
}

static void *phys_to_virt(phys_addr_t phys)
{
	return memory + (phys - PHYS_BASE);
}

static phys_addr_t virt_to_phys(void *address)
{
	return (char *)address - memory + PHYS_BASE;
}

static void maintain(void *address, size_t size)
{
	(void)address;
	SLAT_ADD(cache_calls, 1);
	SLAT_ADD(cache_bytes, size);
}

/* RCU's callback, at once: nobody else walks. The argument is the level of the entry replaced. */
static void free_unlinked_table(void *address, s8 level)
{
	kvm_pgtable_stage2_free_unlinked(&machine_mm_ops, address, level);
}

struct kvm_pgtable_mm_ops machine_mm_ops = {
	.zalloc_page = zalloc_page,
	.zalloc_pages_exact = zalloc_pages_exact,
	.free_pages_exact = free_pages_exact,
	.free_unlinked_table = (void *)free_unlinked_table,
	.get_page = get_page,
	.put_page = put_page,
	.page_count = page_count,
	.phys_to_virt = phys_to_virt,
	.virt_to_phys = virt_to_phys,
	.dcache_clean_inval_poc = maintain,
	.icache_inval_pou = maintain,
};
