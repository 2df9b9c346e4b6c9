// SPDX-License-Identifier: GPL-2.0-only
/*
 * Ageing that races with unmapping. One thread ages all guest pages in a loop,
 * using idle page tracking. The other thread has KVM unmap pages, or free tables,
 * and reuses the memory immediately:
 *
 * - madvise() frees the pages, and a write allocates new ones. A vCPU in the
 *   same thread must read the new data. If ageing restores an entry that was
 *   removed, the vCPU reads a page that was freed.
 *
 * - On arm64 a second vCPU is reinitialised. Without FEAT_S2FWB, KVM then unmaps
 *   all guest memory and frees the tables. Elsewhere the second vCPU writes to a
 *   huge page after its dirty log has ended. If KVM split its mapping for the log,
 *   it now maps it as a whole again and frees the table. Pages of pipes are
 *   allocated in the same way as tables. The data written to a pipe looks like
 *   valid entries with the accessed bit set, so a walk in a freed table clears
 *   this bit in the data.
 *
 * Both races are narrow. They need two CPUs, and a kernel with delays in the
 * ageing walk to be hit reliably.
 */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvm_util.h"
#include "processor.h"
#include "test_util.h"
#include "ucall_common.h"

#define MEMORY_GPA	0x80000000ul
#define MEMORY_SLOT	1
#define PAGES		64

#define HUGE_GPA	0xc0000000ul
#define HUGE_SLOT	2
#define HUGE_BYTES	(2ul << 20)

/* A descriptor of a page with the accessed bit set. */
#ifdef __riscv
#define LOOKS_YOUNG	0xdful
#else
#define LOOKS_YOUNG	0x7fful
#endif

/* Written by the host while no vCPU runs. */
static unsigned long round_now;

static bool stop;
static unsigned long asked;
static void *memory, *huge;

static unsigned long word_of(unsigned long round, unsigned long page)
{
	return round << 32 | page << 12 | LOOKS_YOUNG;
}

/* Read all pages, and write to each of two pages in turn if there are such. */
static void guest_code(unsigned long pages, unsigned long page_size, unsigned long written)
{
	unsigned long page, run;

	for (run = 0;; run++) {
		for (page = 0; page < pages; page++) {
			volatile unsigned long *word = (void *)(MEMORY_GPA + page * page_size);

			GUEST_ASSERT_EQ(*word, word_of(round_now, page));
		}
		if (written)
			*(volatile unsigned long *)(written + run % 2 * page_size) = run;
		GUEST_SYNC(0);
	}
}

static void run_vcpu(struct kvm_vcpu *vcpu)
{
	struct ucall uc;

	vcpu_run(vcpu);
	switch (get_ucall(vcpu, &uc)) {
	case UCALL_SYNC:
		break;
	case UCALL_ABORT:
		REPORT_GUEST_ASSERT(uc);
		break;
	default:
		TEST_FAIL("The guest left for another reason: %s",
			  exit_reason_str(vcpu->run->exit_reason));
	}
}

static void pin_to(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	TEST_ASSERT(!sched_setaffinity(0, sizeof(set), &set), "Cannot run on CPU %d", cpu);
}

static void age_page(int idle, int pagemap, void *page)
{
	unsigned long entry, pfn, bit;

	TEST_ASSERT(pread(pagemap, &entry, 8, (unsigned long)page / getpagesize() * 8) == 8,
		    "Cannot read the page map");
	pfn = entry & ((1ul << 55) - 1);
	if (!(entry >> 63) || !pfn)
		return;
	bit = 1ul << pfn % 64;
	TEST_ASSERT(pwrite(idle, &bit, 8, pfn / 64 * 8) == 8,
		    "Cannot mark frame %lx as idle", pfn);
	__atomic_add_fetch(&asked, 1, __ATOMIC_RELAXED);
}

static void *age(void *cpu)
{
	int idle = open_path_or_exit("/sys/kernel/mm/page_idle/bitmap", O_WRONLY);
	int pagemap = open_path_or_exit("/proc/self/pagemap", O_RDONLY);
	size_t page;

	pin_to((long)cpu);
	while (!READ_ONCE(stop)) {
		for (page = 0; page < PAGES; page++) {
			age_page(idle, pagemap, memory + page * getpagesize());
			/* Its table is freed: be there often. */
			if (huge)
				age_page(idle, pagemap, huge);
		}
	}
	close(idle);
	close(pagemap);
	return NULL;
}

/* Wait for the current walk and for one more complete walk. */
static void wait_for_ager(void)
{
	unsigned long before = READ_ONCE(asked);

	while (READ_ONCE(asked) < before + 2)
		sched_yield();
}

static void fill(unsigned long *words, unsigned long round)
{
	size_t each = getpagesize() / sizeof(*words), at;

	for (at = 0; at < PAGES * each; at++)
		words[at] = word_of(round, at / each);
}

static void check(const char *whose, const unsigned long *words, unsigned long round)
{
	size_t each = getpagesize() / sizeof(*words), at;

	for (at = 0; at < PAGES * each; at++)
		TEST_ASSERT(words[at] == word_of(round, at / each),
			    "Round %lu, word %zu of %s is %lx, and was %lx: something wrote it",
			    round, at, whose, words[at], word_of(round, at / each));
}

#ifdef __aarch64__
static unsigned long add_huge_page(struct kvm_vm *vm)
{
	return 0;
}

/* A vCPU that never ran can be reinitialised any number of times. */
static void free_tables(struct kvm_vm *vm, struct kvm_vcpu *vcpu)
{
	aarch64_vcpu_setup(vcpu, NULL);
}
#else
/* Return the address of pages for the second vCPU to write to. */
static unsigned long add_huge_page(struct kvm_vm *vm)
{
	vm_userspace_mem_region_add(vm, VM_MEM_SRC_ANONYMOUS_THP, HUGE_GPA, HUGE_SLOT,
				    HUGE_BYTES / getpagesize(), 0);
	virt_map(vm, HUGE_GPA, HUGE_GPA, 2);
	huge = addr_gpa2hva(vm, HUGE_GPA);
	return HUGE_GPA;
}

static void free_tables(struct kvm_vm *vm, struct kvm_vcpu *vcpu)
{
	vm_mem_region_set_flags(vm, HUGE_SLOT, KVM_MEM_LOG_DIRTY_PAGES);
	run_vcpu(vcpu);
	vm_mem_region_set_flags(vm, HUGE_SLOT, 0);
	/* It writes to the other page, which is still protected. */
	run_vcpu(vcpu);
}
#endif

int main(int argc, char **argv)
{
	size_t bytes = PAGES * getpagesize(), done;
	unsigned long rounds = 100, round;
	struct kvm_vcpu *vcpus[2];
	struct kvm_vm *vm;
	pthread_t ager;
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	unsigned long *data;
	int pipes[2], opt;

	while ((opt = getopt(argc, argv, "hr:")) != -1) {
		switch (opt) {
		case 'r':
			rounds = atoi_positive("Number of rounds", optarg);
			break;
		default:
			printf("usage: %s [-r rounds]\n", argv[0]);
			exit(opt != 'h');
		}
	}
	close(open_path_or_exit("/sys/kernel/mm/page_idle/bitmap", O_WRONLY));
	if (cpus < 2)
		pr_info("One CPU: the races cannot be met\n");

	vm = vm_create_with_vcpus(2, guest_code, vcpus);
	__TEST_REQUIRE(vm->page_size == getpagesize(), "The guest's pages are not the host's");
	vm_userspace_mem_region_add(vm, VM_MEM_SRC_ANONYMOUS, MEMORY_GPA, MEMORY_SLOT, PAGES, 0);
	virt_map(vm, MEMORY_GPA, MEMORY_GPA, PAGES);
	memory = addr_gpa2hva(vm, MEMORY_GPA);
	vcpu_args_set(vcpus[0], 3, (unsigned long)PAGES, (unsigned long)getpagesize(), 0ul);
	vcpu_args_set(vcpus[1], 3, 0ul, (unsigned long)getpagesize(), add_huge_page(vm));
	data = malloc(bytes);
	TEST_ASSERT(data && !pipe(pipes), "No memory, or no pipe");
	TEST_ASSERT(fcntl(pipes[1], F_SETPIPE_SZ, bytes) >= (int)bytes, "The pipe is too small");

	run_vcpu(vcpus[1]);
	pin_to(0);
	pthread_create(&ager, NULL, age, (void *)(cpus > 1 ? 1l : 0l));

	for (round = 1; round <= rounds; round++) {
		fill(memory, round);
		round_now = round;
		sync_global_to_guest(vm, round_now);
		run_vcpu(vcpus[0]);
		if (round % 2) {
			fill(data, round);
			free_tables(vm, vcpus[1]);
			TEST_ASSERT(write(pipes[1], data, bytes) == (ssize_t)bytes,
				    "The pipe takes no %zu bytes", bytes);
			wait_for_ager();
			for (done = 0; done < bytes;) {
				ssize_t got = read(pipes[0], (void *)data + done, bytes - done);

				TEST_ASSERT(got > 0, "The pipe has no %zu bytes", bytes);
				done += got;
			}
			check("a pipe", data, round);
			check("the guest's memory", memory, round);
		} else {
			/* Keep the last page, so that the table is not freed. */
			TEST_ASSERT(!madvise(memory, bytes - getpagesize(), MADV_DONTNEED),
				    "madvise() failed");
		}
	}

	WRITE_ONCE(stop, true);
	pthread_join(ager, NULL);
	TEST_ASSERT(asked, "No page was asked for");
	pr_info("%lu rounds, in which KVM was asked for %lu pages\n", rounds, asked);
	free(data);
	kvm_vm_free(vm);
	return 0;
}
