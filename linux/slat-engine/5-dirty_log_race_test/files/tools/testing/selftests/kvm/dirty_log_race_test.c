// SPDX-License-Identifier: GPL-2.0-only
/*
 * A migration that races with writes. Several vCPUs write to all pages, which
 * are mapped by blocks when the log begins. Meanwhile the host takes the log,
 * clears every other page of it, and copies what it cleared; then the others.
 * At the end, when no vCPU runs, one more log must be all that is missing from
 * the copy: a page that differs was written and never logged.
 *
 * Where KVM counts what its faults do, and they split blocks, writes after the
 * log must put blocks back.
 */
#include <linux/bitmap.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvm_util.h"
#include "processor.h"
#include "test_util.h"
#include "ucall_common.h"

#define MEMORY_GPA	0x80000000ul
#define MEMORY_SLOT	1
#define MAX_VCPUS	8

static bool stop;
static unsigned long runs[MAX_VCPUS];
static void *memory, *copy;

/* Each vCPU has a word of its own in each page. */
static void guest_code(unsigned long vcpu, unsigned long pages, unsigned long page_size)
{
	unsigned long round, page;

	for (round = 0;; round++) {
		for (page = 0; page < pages; page++) {
			volatile unsigned long *words = (void *)(MEMORY_GPA + page * page_size);

			GUEST_ASSERT_EQ(words[vcpu], round);
			words[vcpu] = round + 1;
		}
		GUEST_SYNC(0);
	}
}

static void run_once(struct kvm_vcpu *vcpu)
{
	struct ucall uc;

	vcpu_run(vcpu);
	switch (get_ucall(vcpu, &uc)) {
	case UCALL_SYNC:
		__atomic_add_fetch(&runs[vcpu->id], 1, __ATOMIC_RELAXED);
		break;
	case UCALL_ABORT:
		REPORT_GUEST_ASSERT(uc);
		break;
	default:
		TEST_FAIL("The guest left for another reason: %s",
			  exit_reason_str(vcpu->run->exit_reason));
	}
}

static void *run_vcpu(void *vcpu)
{
	while (!READ_ONCE(stop))
		run_once(vcpu);
	return NULL;
}

/* Clears those pages of the log that the mask has, and copies them. */
static unsigned long copy_some(struct kvm_vm *vm, const unsigned long *log, unsigned long *some,
			       unsigned long pages, unsigned long mask)
{
	size_t page_size = getpagesize();
	unsigned long page, copied = 0;

	for (page = 0; page < pages / BITS_PER_LONG; page++)
		some[page] = log[page] & mask;
	kvm_vm_clear_dirty_log(vm, MEMORY_SLOT, some, 0, pages);
	for (page = 0; page < pages; page++) {
		if (!test_bit(page, some))
			continue;
		memcpy(copy + page * page_size, memory + page * page_size, page_size);
		copied++;
	}
	return copied;
}

static unsigned long copy_logged(struct kvm_vm *vm, unsigned long *log, unsigned long *some,
				 unsigned long pages)
{
	unsigned long copied;

	kvm_vm_get_dirty_log(vm, MEMORY_SLOT, log);
	copied = copy_some(vm, log, some, pages, ~0ul / 3);
	return copied + copy_some(vm, log, some, pages, ~0ul / 3 << 1);
}

/* Returns how many faults of all VMs did so; 0 if KVM does not count. */
static long faults_that(const char *did)
{
	FILE *file = fopen("/sys/module/kvm/parameters/slat_faults", "r");
	char text[256] = "", *found;

	if (file) {
		TEST_ASSERT(fgets(text, sizeof(text), file), "Cannot read slat_faults");
		fclose(file);
	}
	found = strstr(text, did);
	return found ? atol(found + strlen(did)) : 0;
}

int main(int argc, char **argv)
{
	unsigned long page_size = getpagesize(), copied = 0, page, guest_pages;
	/* A huge page, unless that is 512 MiB. */
	unsigned long pages = page_size == 65536 ? 512 : page_size / 8;
	unsigned long rounds = 50, vcpus = 2, round, i;
	struct kvm_vcpu *vcpu[MAX_VCPUS];
	pthread_t threads[MAX_VCPUS];
	unsigned long *log, *some;
	struct kvm_vm *vm;
	long split, joined;
	int opt;

	while ((opt = getopt(argc, argv, "hr:v:")) != -1) {
		switch (opt) {
		case 'r':
			rounds = atoi_positive("Number of rounds", optarg);
			break;
		case 'v':
			vcpus = atoi_positive("Number of vCPUs", optarg);
			TEST_ASSERT(vcpus <= MAX_VCPUS, "At most %d vCPUs", MAX_VCPUS);
			break;
		default:
			printf("usage: %s [-r rounds] [-v vcpus]\n", argv[0]);
			exit(opt != 'h');
		}
	}

	vm = vm_create_with_vcpus(vcpus, guest_code, vcpu);
	guest_pages = pages * page_size / vm->page_size;
	vm_enable_cap(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE);
	vm_userspace_mem_region_add(vm, VM_MEM_SRC_ANONYMOUS_THP, MEMORY_GPA, MEMORY_SLOT,
				    guest_pages, 0);
	virt_map(vm, MEMORY_GPA, MEMORY_GPA, guest_pages);
	memory = addr_gpa2hva(vm, MEMORY_GPA);
	copy = malloc(pages * page_size);
	log = bitmap_zalloc(pages);
	some = bitmap_zalloc(pages);
	TEST_ASSERT(copy && log && some, "No memory");

	/* The first access of the host gets a huge page, which the guest then maps by a block. */
	memset(memory, 0, pages * page_size);
	for (i = 0; i < vcpus; i++) {
		vcpu_args_set(vcpu[i], 3, i, pages, page_size);
		TEST_ASSERT(!pthread_create(&threads[i], NULL, run_vcpu, vcpu[i]), "No thread");
	}
	for (i = 0; i < vcpus; i++)
		while (!READ_ONCE(runs[i]))
			usleep(1000);
	vm_mem_region_set_flags(vm, MEMORY_SLOT, KVM_MEM_LOG_DIRTY_PAGES);
	memcpy(copy, memory, pages * page_size);
	split = faults_that("split ");
	for (round = 0; round < rounds; round++) {
		copied += copy_logged(vm, log, some, pages);
		usleep(1000);
	}
	WRITE_ONCE(stop, true);
	for (i = 0; i < vcpus; i++)
		pthread_join(threads[i], NULL);
	copy_logged(vm, log, some, pages);

	for (page = 0; page < pages; page++)
		TEST_ASSERT(!memcmp(copy + page * page_size, memory + page * page_size, page_size),
			    "Page %lu was written and is not in the log", page);
	TEST_ASSERT(copied, "Nothing was logged while the guest ran");
	split = faults_that("split ") - split;

	/* The last log has protected all pages again. */
	vm_mem_region_set_flags(vm, MEMORY_SLOT, 0);
	joined = faults_that("joined ");
	run_once(vcpu[0]);
	joined = faults_that("joined ") - joined;
	TEST_ASSERT(joined || !split, "%ld faults split blocks, and none came back", split);
	pr_info("%lu rounds, %lu pages copied beside %lu vCPUs; %ld faults split, %ld joined\n",
		rounds, copied, vcpus, split, joined);
	kvm_vm_free(vm);
	return 0;
}
