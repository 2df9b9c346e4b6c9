// SPDX-License-Identifier: GPL-2.0-only
/*
 * Each vCPU of a VM switches its MMU and caches on. Without FEAT_S2FWB, KVM
 * flushes the VM's memory for each of them, or with KVM_CAP_ARM_FLUSH_ONCE for
 * the first alone. The test checks the rules of the capability and that each
 * way of switching goes through, and prints how long each switch takes. How
 * often KVM flushes is for a probe of stage2_flush_vm() or the tracepoint
 * kvm_toggle_cache to count.
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

/* SCTLR_EL1 with its RES1 bits, and M and C off; both bits. */
#define SCTLR_OFF	0x30d00800ul
#define SCTLR_M_C	0x5ul

/*
 * Writes a word to each page from x4 up to x5, x6 apart; changes the bits x0 of
 * SCTLR_EL1; leaves by a write to x3, which is no memory. Runs with the MMU off
 * and on, at the same address, and without a stack.
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

/* The time that the vCPU takes to write @bytes of memory and to switch. */
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

	/* The last vCPU begins anew, which arms the flush, and is the first again. */
	i = nr_vcpus - 1;
	aarch64_vcpu_setup(vcpus[i], NULL);
	begin(vcpus[i]);
	again = run_switch(vcpus[i], bytes);

	/* Off is not seen, as registers are not trapped any more: no flush either way. */
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
