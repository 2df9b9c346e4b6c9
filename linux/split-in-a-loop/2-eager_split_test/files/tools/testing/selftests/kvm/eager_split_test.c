// SPDX-License-Identifier: GPL-2.0-only
/*
 * Eager page splitting. A guest maps memory by blocks, which KVM then splits to
 * pages: when the dirty log is enabled, or when the log is cleared if userspace
 * protects manually and all pages are initially set. Each page must still map
 * the same memory, and must be read-only until a write is logged.
 */
#include <linux/bitmap.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kvm_util.h"
#include "processor.h"
#include "test_util.h"
#include "ucall_common.h"

#define SLOT0_PAGES	2048
#define MEMORY_GPA	0x80000000ul
#define MEMORY_SLOT	1
#define BLOCKS		2

/* What the guest does, and the number of pages from one access to the next. */
static bool guest_writes;
static unsigned long stride;

static unsigned long word_of(unsigned long page)
{
	return page << 1;
}

/* A write sets bit 0 of the word. */
static void guest_code(unsigned long pages, unsigned long page_size)
{
	unsigned long page;

	for (;;) {
		for (page = 0; page < pages; page += READ_ONCE(stride)) {
			volatile unsigned long *word = (void *)(MEMORY_GPA + page * page_size);

			GUEST_ASSERT_EQ(*word & ~1ul, word_of(page));
			if (READ_ONCE(guest_writes))
				*word |= 1;
		}
		GUEST_SYNC(0);
	}
}

static void run_guest(struct kvm_vcpu *vcpu, bool writes, unsigned long pages)
{
	struct ucall uc;

	guest_writes = writes;
	stride = pages;
	sync_global_to_guest(vcpu->vm, guest_writes);
	sync_global_to_guest(vcpu->vm, stride);
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

/* KVM takes the chunk size only while the VM has no memslot. */
static struct kvm_vm *create_vm(unsigned long chunk, bool initially_set)
{
	struct kvm_vm *vm = vm_create_barebones();
	int i;

	__TEST_REQUIRE(vm->page_size == getpagesize(), "The guest's pages are not the host's");
	vm_enable_cap(vm, KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, chunk);
	if (initially_set)
		vm_enable_cap(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
			      KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET);

	vm_userspace_mem_region_add(vm, VM_MEM_SRC_ANONYMOUS, 0, 0, SLOT0_PAGES, 0);
	for (i = 0; i < NR_MEM_REGIONS; i++)
		vm->memslots[i] = 0;
	kvm_vm_elf_load(vm, program_invocation_name);
	ucall_init(vm, SLOT0_PAGES * getpagesize());
	return vm;
}

/* The log and the memory have the writes of every @written-th page, and no others. */
static void check(struct kvm_vm *vm, unsigned long pages, unsigned long written)
{
	unsigned long *log = bitmap_zalloc(pages), page;

	kvm_vm_get_dirty_log(vm, MEMORY_SLOT, log);
	for (page = 0; page < pages; page++) {
		unsigned long *word = addr_gpa2hva(vm, MEMORY_GPA + page * getpagesize());
		bool wrote = written && page % written == 0;

		TEST_ASSERT(*word == (word_of(page) | wrote), "Page %lu has %lx, the guest wrote %lx",
			    page, *word, word_of(page) | wrote);
		TEST_ASSERT(test_bit(page, log) == wrote, "Page %lu was %swritten and is %sin the log",
			    page, wrote ? "" : "not ", wrote ? "not " : "");
	}
	free(log);
}

static void run_test(unsigned long block, unsigned long chunk, bool initially_set)
{
	unsigned long pages = BLOCKS * block / getpagesize(), page;
	struct kvm_vm *vm = create_vm(chunk, initially_set);
	struct kvm_vcpu *vcpu = vm_vcpu_add(vm, 0, guest_code);
	unsigned long *log = bitmap_zalloc(pages);

	vm_userspace_mem_region_add(vm, VM_MEM_SRC_ANONYMOUS_THP, MEMORY_GPA, MEMORY_SLOT,
				    pages, 0);
	virt_map(vm, MEMORY_GPA, MEMORY_GPA, pages);
	vcpu_args_set(vcpu, 2, pages, (unsigned long)getpagesize());
	for (page = 0; page < pages; page++)
		*(unsigned long *)addr_gpa2hva(vm, MEMORY_GPA + page * getpagesize()) =
			word_of(page);

	/* One access maps a block, unless the host has no huge page for it. */
	run_guest(vcpu, false, block / getpagesize());
	vm_mem_region_set_flags(vm, MEMORY_SLOT, KVM_MEM_LOG_DIRTY_PAGES);
	if (initially_set) {
		bitmap_fill(log, pages);
		kvm_vm_clear_dirty_log(vm, MEMORY_SLOT, log, 0, pages);
	}

	run_guest(vcpu, false, 1);
	check(vm, pages, 0);
	run_guest(vcpu, true, 3);
	check(vm, pages, 3);

	free(log);
	kvm_vm_free(vm);
}

int main(int argc, char **argv)
{
	unsigned long block = getpagesize() / 8 * (unsigned long)getpagesize();

	TEST_REQUIRE(kvm_check_cap(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES) & block);
	run_test(block, block, false);
	run_test(block, block, true);
	pr_info("%d blocks of %lu bytes, split when the log is enabled and when it is cleared\n",
		BLOCKS, block);
	return 0;
}
