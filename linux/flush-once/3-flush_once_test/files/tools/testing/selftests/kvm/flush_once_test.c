// SPDX-License-Identifier: GPL-2.0-only
/*
 * Each vCPU of a VM enables its MMU and caches. Without FEAT_S2FWB, KVM flushes
 * all guest memory for each of them, or only for the first one if
 * KVM_CAP_ARM_FLUSH_ONCE is enabled. Check the rules of the capability and all
 * ways to switch the caches, and print how long each switch takes. Use a probe
 * of stage2_flush_vm() or the tracepoint kvm_toggle_cache to count the flushes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kvm_util.h"
#include "processor.h"
#include "test_util.h"

#ifndef KVM_CAP_ARM_FLUSH_ONCE
#define KVM_CAP_ARM_FLUSH_ONCE 252
#endif

#define CODE_GPA	0x80000000ul
#define EXIT_GPA	0x70000000ul
#define CODE_SLOT	1

/* SCTLR_EL1 with RES1 bits set and M and C clear; M and C. */
#define SCTLR_OFF	0x30d00800ul
#define SCTLR_M_C	0x5ul

/*
 * Write a word every x6 bytes from x4 to x5, toggle the bits x0 of SCTLR_EL1,
 * and exit with an MMIO write to x3. Runs with the MMU off and on, at the same
 * address, and without a stack.
 */
extern unsigned char switch_begin[], switch_end[];
asm(".pushsection .rodata\n"
    ".balign 4\n"
    "switch_begin:\n"
    "1:	cmp	x4, x5\n"
    "	b.hs	2f\n"
    "	str	x0, [x4]\n"
    "	add	x4, x4, x6\n"
    "	b	1b\n"
    "2:	mrs	x1, sctlr_el1\n"
    "	eor	x1, x1, x0\n"
    "	msr	sctlr_el1, x1\n"
    "	isb\n"
    "	str	x0, [x3]\n"
    "	b	.\n"
    "switch_end:\n"
    ".popsection\n");

static void begin(struct kvm_vcpu *vcpu)
{
	vcpu_set_reg(vcpu, KVM_ARM64_SYS_REG(SYS_SCTLR_EL1), SCTLR_OFF);
}

/* Return the time that the vCPU takes to write @bytes and to switch. */
static double run_switch(struct kvm_vcpu *vcpu, size_t bytes)
{
	struct timespec start, took;

	vcpu_set_reg(vcpu, ARM64_CORE_REG(regs.pc), CODE_GPA);
	vcpu_set_reg(vcpu, ARM64_CORE_REG(regs.regs[0]), SCTLR_M_C);
	vcpu_set_reg(vcpu, ARM64_CORE_REG(regs.regs[3]), EXIT_GPA);
	vcpu_set_reg(vcpu, ARM64_CORE_REG(regs.regs[4]), CODE_GPA + getpagesize());
	vcpu_set_reg(vcpu, ARM64_CORE_REG(regs.regs[5]), CODE_GPA + getpagesize() + bytes);
	vcpu_set_reg(vcpu, ARM64_CORE_REG(regs.regs[6]), getpagesize());

	clock_gettime(CLOCK_MONOTONIC, &start);
	vcpu_run(vcpu);
	took = timespec_elapsed(start);

	TEST_ASSERT(vcpu->run->exit_reason == KVM_EXIT_MMIO &&
		    vcpu->run->mmio.phys_addr == EXIT_GPA,
		    "vCPU %u left for another reason: %s", vcpu->id,
		    exit_reason_str(vcpu->run->exit_reason));
	vcpu_run_complete_io(vcpu);
	return took.tv_sec * 1e3 + took.tv_nsec / 1e6;
}

static void run_test(int nr_vcpus, size_t bytes, bool once)
{
	static struct kvm_vcpu *vcpus[KVM_MAX_VCPUS];
	double first, rest = 0, off, on, again;
	struct kvm_vm *vm = vm_create(nr_vcpus);
	struct kvm_enable_cap cap = { .cap = KVM_CAP_ARM_FLUSH_ONCE, .args = { 1 } };
	int i;

	vm_userspace_mem_region_add(vm, VM_MEM_SRC_ANONYMOUS, CODE_GPA, CODE_SLOT,
				    (bytes >> vm->page_shift) + (getpagesize() >> vm->page_shift),
				    0);
	virt_map(vm, CODE_GPA, CODE_GPA, 1);
	virt_map(vm, EXIT_GPA, EXIT_GPA, 1);
	memcpy(addr_gpa2hva(vm, CODE_GPA), switch_begin, switch_end - switch_begin);
	__builtin___clear_cache(addr_gpa2hva(vm, CODE_GPA),
				addr_gpa2hva(vm, CODE_GPA) + (switch_end - switch_begin));

	if (once) {
		struct kvm_enable_cap bad = { .cap = KVM_CAP_ARM_FLUSH_ONCE, .args = { 2 } };

		TEST_ASSERT(__vm_ioctl(vm, KVM_ENABLE_CAP, &bad) == -1 && errno == EINVAL,
			    "An argument that means nothing was taken");
		vm_ioctl(vm, KVM_ENABLE_CAP, &cap);
	}

	for (i = 0; i < nr_vcpus; i++) {
		vcpus[i] = vm_vcpu_add(vm, i, (void *)CODE_GPA);
		begin(vcpus[i]);
	}
	if (once)
		TEST_ASSERT(__vm_ioctl(vm, KVM_ENABLE_CAP, &cap) == -1 && errno == EINVAL,
			    "The capability was taken after a vCPU was created");

	first = run_switch(vcpus[0], bytes);
	for (i = 1; i < nr_vcpus; i++)
		rest += run_switch(vcpus[i], 0);

	/* Reset the last vCPU. It has to flush again when it enables its caches. */
	i = nr_vcpus - 1;
	aarch64_vcpu_setup(vcpus[i], NULL);
	begin(vcpus[i]);
	again = run_switch(vcpus[i], bytes);

	/* The registers are no longer trapped, so disabling never flushes here. */
	off = run_switch(vcpus[i], 0);
	on = run_switch(vcpus[i], 0);

	pr_info("%s: %d vCPUs, %zu bytes: first on %.3f ms, %d others %.3f ms, after init %.3f ms, untrapped off %.3f on %.3f ms\n",
		once ? "flush once" : "flush each", nr_vcpus, bytes, first, nr_vcpus - 1,
		rest, again, off, on);
	kvm_vm_free(vm);
}

int main(int argc, char **argv)
{
	size_t bytes = 16 << 20;
	int nr_vcpus = 4, opt;

	while ((opt = getopt(argc, argv, "b:hv:")) != -1) {
		switch (opt) {
		case 'b':
			bytes = parse_size(optarg);
			break;
		case 'v':
			nr_vcpus = atoi_positive("Number of vCPUs", optarg);
			TEST_ASSERT(nr_vcpus <= KVM_MAX_VCPUS, "Too many vCPUs");
			break;
		default:
			printf("usage: %s [-b bytes that vCPU 0 writes] [-v vCPUs]\n", argv[0]);
			exit(opt != 'h');
		}
	}
	TEST_ASSERT(bytes % getpagesize() == 0, "Bytes are no whole pages");

	run_test(nr_vcpus, bytes, false);
	if (kvm_check_cap(KVM_CAP_ARM_FLUSH_ONCE))
		run_test(nr_vcpus, bytes, true);
	else
		pr_info("No KVM_CAP_ARM_FLUSH_ONCE: KVM has it not, or the CPUs have FEAT_S2FWB\n");
	return 0;
}
