// SPDX-License-Identifier: GPL-2.0-only
/*
 * Which of 64 pages were accessed, by one question to the MMU notifiers.
 *
 * The pages are one range of the process, and of the vCPUs' virtual memory:
 *
 *	page 0		memslot 1
 *	page 27		a hole: memory of the process, and no memslot
 *	page 35		memslot 2, whose guest frames are far from those of memslot 1
 *	page 64
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvm_util.h"
#include "processor.h"
#include "test_util.h"
#include "ucall_common.h"

#define PAGES		64
#define FIRST_END	27
#define SECOND		35
#define HOLE		(((1ul << (SECOND - FIRST_END)) - 1) << FIRST_END)
#define ALL		(~0ul)

#define MEMORY_GVA	0xc0000000ul
#define FIRST_GPA	0x80000000ul
#define SECOND_GPA	0x90000000ul
#define HUGE_GPA	0xa0000000ul
#define HUGE_GVA	0xd0000000ul
#define HUGE_SIZE	(2ul << 20)

struct answer {
	unsigned long young;
	unsigned long unanswered;
	unsigned long coarse;
};

/* Written by the host while the vCPU does not run: the pages that each vCPU uses. */
static unsigned long uses[2];
static unsigned long base = MEMORY_GVA;

static bool stop;
static bool tlb_outlives_exits;
static size_t page_size;
static unsigned char *memory;
static struct kvm_vm *vm;
static struct kvm_vcpu *vcpus[2];
static int debug;

static void guest_code(unsigned long own, unsigned long size)
{
	unsigned long page;

	for (;;) {
		for (page = 0; page < PAGES; page++) {
			volatile unsigned long *word = (void *)(base + page * size + own * 8);

			if (!(uses[own] >> page & 1))
				continue;
			if (page % 2)
				*word += 1;
			else
				(void)*word;
		}
		GUEST_SYNC(0);
	}
}

static void run_vcpu(struct kvm_vcpu *vcpu)
{
	struct ucall uc;

	vcpu_run(vcpu);
	TEST_ASSERT(get_ucall(vcpu, &uc) == UCALL_SYNC, "The guest left for another reason: %s",
		    exit_reason_str(vcpu->run->exit_reason));
}

static void use(int vcpu, unsigned long pages)
{
	uses[vcpu] = pages;
	sync_global_to_guest(vm, uses[vcpu]);
	run_vcpu(vcpus[vcpu]);
}

static struct answer ask(void *start, unsigned int nr, bool clear, unsigned long asked)
{
	struct answer answer;
	char text[80];
	int len;

	len = snprintf(text, sizeof(text), "%lx %u %u %lx", (unsigned long)start, nr, clear, asked);
	TEST_ASSERT(write(debug, text, len) == len, "The kernel refuses \"%s\"", text);
	len = pread(debug, text, sizeof(text) - 1, 0);
	TEST_ASSERT(len > 0, "The kernel does not answer");
	text[len] = 0;
	TEST_ASSERT(sscanf(text, "%lx %lx %lx", &answer.young, &answer.unanswered,
			   &answer.coarse) == 3, "The kernel answers \"%s\"", text);
	TEST_ASSERT(!((answer.young | answer.unanswered | answer.coarse) & ~asked),
		    "The kernel answers \"%s\" for pages that were not asked about", text);
	return answer;
}

/* Asks, and compares the answer with the pages that were used. */
static void expect(const char *what, unsigned int first, unsigned int nr, bool clear,
		   unsigned long asked, unsigned long used)
{
	struct answer answer = ask(memory + first * page_size, nr, clear, asked);

	TEST_ASSERT(!answer.unanswered, "%s: pages %lx are unanswered", what, answer.unanswered);
	TEST_ASSERT(!(answer.young & ~used), "%s: of %u pages from page %u, %lx are young, and %lx were used",
		    what, nr, first, answer.young, used);
	TEST_ASSERT(tlb_outlives_exits || answer.young == used,
		    "%s: of %u pages from page %u, %lx are young, and %lx were used",
		    what, nr, first, answer.young, used);
	TEST_ASSERT(!answer.coarse, "%s: pages %lx are coarse", what, answer.coarse);
}

static unsigned long next_random(void)
{
	static unsigned long state = 0x9e3779b97f4a7c15ul;

	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static void test_patterns(unsigned int rounds)
{
	unsigned int round;

	for (round = 0; round < rounds; round++) {
		unsigned long used[2] = { next_random() & ~HOLE, next_random() & next_random() & ~HOLE };
		unsigned long asked = next_random(), both = used[0] | used[1];
		unsigned int first = next_random() % PAGES, nr = 1 + next_random() % (PAGES - first);
		unsigned long part = nr == PAGES ? ALL : (1ul << nr) - 1;

		use(0, used[0]);
		use(1, used[1]);
		expect("Tested", 0, PAGES, false, ALL, both);
		expect("Tested again", 0, PAGES, false, asked, both & asked);
		expect("A part tested", first, nr, false, part, both >> first & part);
		expect("A part cleared", first, nr, true, part, both >> first & part);
		both &= ~(part << first);
		expect("Tested after a part was cleared", 0, PAGES, false, ALL, both);
		expect("Cleared", 0, PAGES, true, asked, both & asked);
		expect("Tested after some were cleared", 0, PAGES, false, ALL, both & ~asked);
		expect("All cleared", 0, PAGES, true, ALL, both & ~asked);
		expect("Tested after all were cleared", 0, PAGES, false, ALL, 0);
	}
	pr_info("%u patterns of two vCPUs\n", rounds);
}

static void test_unmapped(void)
{
	unsigned long gone = 1ul << 3 | 1ul << 40;

	use(0, ~HOLE);
	TEST_ASSERT(!madvise(memory + 3 * page_size, page_size, MADV_DONTNEED) &&
		    !madvise(memory + 40 * page_size, page_size, MADV_DONTNEED), "madvise() failed");
	expect("Unmapped", 0, PAGES, false, ALL, ~HOLE & ~gone);
	expect("Unmapped, alone", 3, 1, true, 1, 0);
	expect("Cleared with unmapped pages", 0, PAGES, true, ALL, ~HOLE & ~gone);
	use(0, gone);
	expect("Mapped again", 0, PAGES, true, ALL, gone);
	pr_info("pages that were unmapped are old\n");
}

static bool is_huge(void *at)
{
	unsigned long start, size = 0;
	bool inside = false;
	char line[256];
	FILE *smaps = fopen("/proc/self/smaps", "r");

	while (smaps && fgets(line, sizeof(line), smaps)) {
		unsigned long end;

		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			inside = (unsigned long)at >= start && (unsigned long)at < end;
		else if (inside && sscanf(line, "AnonHugePages: %lu kB", &size) == 1)
			break;
	}
	if (smaps)
		fclose(smaps);
	return size;
}

static void test_huge(void)
{
	void *area = mmap(NULL, 2 * HUGE_SIZE, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	void *huge = (void *)(((unsigned long)area + HUGE_SIZE - 1) & ~(HUGE_SIZE - 1));
	unsigned long asked = 0xf00ful;
	struct answer answer;

	TEST_ASSERT(area != MAP_FAILED, "No memory for a huge page");
	if (madvise(huge, HUGE_SIZE, MADV_HUGEPAGE) || !memset(huge, 1, HUGE_SIZE) || !is_huge(huge)) {
		pr_info("No huge page: not tested\n");
		return;
	}
	vm_set_user_memory_region(vm, 12, 0, HUGE_GPA, HUGE_SIZE, huge);
	virt_map(vm, HUGE_GVA, HUGE_GPA, PAGES);
	base = HUGE_GVA;
	sync_global_to_guest(vm, base);
	use(0, 1ul << 5);
	base = MEMORY_GVA;
	sync_global_to_guest(vm, base);

	answer = ask(huge, PAGES, false, asked);
	if (!answer.coarse) {
		pr_info("KVM does not map the huge page by one entry: not tested\n");
		return;
	}
	TEST_ASSERT(!answer.unanswered && answer.young == asked && answer.coarse == asked,
		    "Of a huge page %lx are young, %lx coarse", answer.young, answer.coarse);
	answer = ask(huge + HUGE_SIZE / 2, PAGES, true, ALL);
	TEST_ASSERT(answer.young == ALL && answer.coarse == ALL,
		    "Of its second half %lx are young, %lx coarse", answer.young, answer.coarse);
	answer = ask(huge, PAGES, false, ALL);
	TEST_ASSERT(!answer.young, "After clearing a huge page %lx are young", answer.young);
	pr_info("a huge page is one page\n");
}

static void *run(void *vcpu)
{
	while (!READ_ONCE(stop))
		run_vcpu(vcpu);
	return NULL;
}

/* Two vCPUs use pages meanwhile: pages that neither uses stay old, and others become young. */
static void test_meanwhile(unsigned int rounds)
{
	const unsigned long used[2] = { 0x5555555555555555ul & ~HOLE, 0x0202020202020202ul & ~HOLE };
	const unsigned long both = used[0] | used[1];
	unsigned long seen = 0, times = 0;
	pthread_t threads[2];
	unsigned int round;
	int i;

	expect("Before", 0, PAGES, true, ALL, 0);
	for (i = 0; i < 2; i++) {
		uses[i] = used[i];
		sync_global_to_guest(vm, uses[i]);
		pthread_create(&threads[i], NULL, run, vcpus[i]);
	}
	for (round = 0; round < rounds || (seen != both && round < 1000 * rounds); round++) {
		struct answer answer = ask(memory, PAGES, round % 4, ALL);

		TEST_ASSERT(!answer.unanswered && !answer.coarse && !(answer.young & ~both),
			    "Meanwhile %lx are young, and %lx were used", answer.young, both);
		seen |= answer.young;
		times += __builtin_popcountl(answer.young);
	}
	WRITE_ONCE(stop, true);
	for (i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	TEST_ASSERT(seen == both, "Meanwhile %lx were young, and %lx were used", seen, both);
	ask(memory, PAGES, true, ALL);
	expect("Afterwards", 0, PAGES, false, ALL, 0);
	use(0, used[0]);
	use(1, used[1]);
	expect("Used again", 0, PAGES, true, ALL, both);
	pr_info("%u questions meanwhile, to which %lu pages were young\n", round, times);
}

static void map(uint32_t slot, unsigned long gpa, unsigned int from, unsigned int until)
{
	vm_set_user_memory_region(vm, slot, 0, gpa, (until - from) * page_size,
				  memory + from * page_size);
	virt_map(vm, MEMORY_GVA + from * page_size, gpa, until - from);
}

int main(int argc, char **argv)
{
	unsigned int rounds = 50;
	int i, opt;

	while ((opt = getopt(argc, argv, "hr:t")) != -1) {
		switch (opt) {
		case 'r':
			rounds = atoi_positive("Number of rounds", optarg);
			break;
		case 't':
			tlb_outlives_exits = true;
			break;
		default:
			printf("usage: %s [-r rounds] [-t]\n", argv[0]);
			exit(opt != 'h');
		}
	}
	debug = open("/sys/kernel/debug/mmu_notifier_age", O_RDWR);
	__TEST_REQUIRE(debug >= 0, "This kernel has no mmu_notifier_age in debugfs");

	page_size = getpagesize();
	vm = vm_create_with_vcpus(2, guest_code, vcpus);
	__TEST_REQUIRE(vm->page_size == page_size, "The guest's pages are not the host's");
	for (i = 0; i < 2; i++)
		vcpu_args_set(vcpus[i], 2, (unsigned long)i, page_size);
	memory = mmap(NULL, PAGES * page_size, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	TEST_ASSERT(memory != MAP_FAILED && !madvise(memory, PAGES * page_size, MADV_NOHUGEPAGE),
		    "No memory");
	memset(memory, 0, PAGES * page_size);
	expect("Without memslots", 0, PAGES, false, ALL, 0);
	map(10, FIRST_GPA, 0, FIRST_END);
	map(11, SECOND_GPA, SECOND, PAGES);
	expect("Before any vCPU ran", 0, PAGES, true, ALL, 0);

	test_patterns(rounds);
	test_unmapped();
	test_huge();
	test_meanwhile(20 * rounds);
	kvm_vm_free(vm);
	return 0;
}
