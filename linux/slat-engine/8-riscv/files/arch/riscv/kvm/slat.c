// SPDX-License-Identifier: GPL-2.0-only
/*
 * The G-stage of a VM on Slat's engine: what KVM asks, and what the engine
 * needs of Linux.
 *
 * The engine is Rust, in slat_rust.o. It takes no lock and does not know which
 * threads are in the tables, so a table that it unlinks is freed after an RCU
 * grace period. Readers are under mmu_lock, which is an RCU read-side critical
 * section, or call rcu_read_lock().
 */
#include <linux/kvm_host.h>
#include <linux/moduleparam.h>
#include <linux/pgtable.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include <asm/csr.h>
#include <asm/cpufeature.h>
#include <asm/kvm_slat.h>

/* VMs that are made from now on use the engine. */
static bool slat = true;
module_param(slat, bool, 0644);
MODULE_PARM_DESC(slat, "New VMs have G-stage page tables of Slat's engine");

/* VMs that are made from now on take mmu_lock for reading around dirty logs. */
static bool slat_read_lock = true;
module_param(slat_read_lock, bool, 0644);

/* The most levels of the G-stage, of all VMs. */
static unsigned long slat_levels = 5;
module_param(slat_levels, ulong, 0444);
MODULE_PARM_DESC(slat_levels, "The most levels of G-stage page tables: 3, 4 or 5");

/* The most bits of a VMID, of all VMs. */
static unsigned long slat_vmid_bits = 16;
module_param(slat_vmid_bits, ulong, 0444);
MODULE_PARM_DESC(slat_vmid_bits, "The most bits of a VMID; 0: no VMIDs");

/* VMs made on the engine, and VMs that stayed on C although slat was set. */
static atomic_long_t slat_vms, slat_refused;

/* VMs that are in C now. */
static atomic_t slat_in_c;

enum slat_op { FAULT, MAP, UNMAP, WRPROTECT, AGE, SPLIT, NR_OPS };

static const char *const slat_ops[NR_OPS] = {
	"fault", "map", "unmap", "wrprotect", "age", "split",
};

/* What faults did: `Given` in crates/slat-linux. */
enum slat_given { MAPPED, RIGHTS, SPLIT_BLOCK, JOINED, NR_GIVEN };

static const char *const slat_given[NR_GIVEN] = {
	"mapped", "rights", "split", "joined",
};

/* Calls of the engine, and results of faults. */
static atomic_long_t slat_calls[NR_OPS], slat_faults[NR_GIVEN];

static int slat_get_long(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%ld\n", atomic_long_read(kp->arg));
}

static int slat_get_list(char *buffer, const char *const *names, atomic_long_t *counts, int nr)
{
	int i, len = 0;

	for (i = 0; i < nr; i++)
		len += sysfs_emit_at(buffer, len, "%s%s %ld", i ? ", " : "", names[i],
				     atomic_long_read(&counts[i]));
	return len + sysfs_emit_at(buffer, len, "\n");
}

static int slat_get_calls(char *buffer, const struct kernel_param *kp)
{
	return slat_get_list(buffer, slat_ops, slat_calls, NR_OPS);
}

static int slat_get_faults(char *buffer, const struct kernel_param *kp)
{
	return slat_get_list(buffer, slat_given, slat_faults, NR_GIVEN);
}

static const struct kernel_param_ops slat_long_ops = { .get = slat_get_long };
static const struct kernel_param_ops slat_calls_ops = { .get = slat_get_calls };
static const struct kernel_param_ops slat_faults_ops = { .get = slat_get_faults };

module_param_cb(slat_vms, &slat_long_ops, &slat_vms, 0444);
module_param_cb(slat_refused, &slat_long_ops, &slat_refused, 0444);
module_param_cb(slat_calls, &slat_calls_ops, NULL, 0444);
module_param_cb(slat_faults, &slat_faults_ops, NULL, 0444);

/* The engine: crates/slat-linux/kernel/riscv.rs. */
struct slat_config {
	struct kvm *kvm;
	u64 offset;
	u32 gpa_bits;
	bool memory_types;
};

size_t slat_kvm_bytes(void);
int slat_kvm_init(void *vm, const struct slat_config *config, u64 *root);
bool slat_kvm_destroy_some(void *vm, size_t most);
void slat_kvm_destroy(void *vm);
int slat_kvm_fault(void *vm, u64 gpa, u64 size, u64 hpa, u64 prot, bool sees_valid, void *mc);
int slat_kvm_map(void *vm, u64 addr, u64 size, u64 phys, u64 prot, void *mc);
int slat_kvm_unmap(void *vm, u64 addr, u64 size);
int slat_kvm_wrprotect(void *vm, u64 addr, u64 size);
bool slat_kvm_age(void *vm, u64 addr, u64 size, bool clear);
int slat_kvm_split(void *vm, u64 addr, u64 size, void *mc);
bool slat_kvm_has_retired(void *vm);
void slat_kvm_take_retired(void *vm, u64 words[2]);
void slat_kvm_free_retired(u64 offset, const u64 words[2]);

/* Rights and types of memory as it numbers them. */
#define SLAT_X		BIT(0)
#define SLAT_W		BIT(1)
#define SLAT_R		BIT(2)
#define SLAT_DEVICE	BIT(3)

/* What it calls. */
u64 slat_c_alloc(size_t bytes);
void slat_c_free(u64 pa, size_t bytes);
u64 slat_c_take(struct kvm_mmu_memory_cache *mc);
void slat_c_fence_all(struct kvm *kvm);
void slat_c_fence_range(struct kvm *kvm, u64 gpa, u64 bytes, u64 order);
void slat_c_fence_local_all(struct kvm *kvm);
void slat_c_fence_local(struct kvm *kvm, u64 gpa, u64 bytes, u64 order);
void __noreturn slat_c_panic(void);

/* Tables are freed by so many at a time when a VM ends. */
#define SLAT_DESTROY_TABLES	512

/* Bytes that are protected or unmapped before others get the lock. */
#define SLAT_CHUNK		(32 * PMD_SIZE)

u64 slat_c_alloc(size_t bytes)
{
	struct page *page = alloc_pages(GFP_KERNEL_ACCOUNT | __GFP_ZERO, get_order(bytes));

	if (!page)
		return 0;
	kvm_account_pgtable_pages(page_address(page), bytes >> PAGE_SHIFT);
	return page_to_phys(page);
}

void slat_c_free(u64 pa, size_t bytes)
{
	void *va = __va(pa);

	kvm_account_pgtable_pages(va, -(int)(bytes >> PAGE_SHIFT));
	free_pages((unsigned long)va, get_order(bytes));
}

u64 slat_c_take(struct kvm_mmu_memory_cache *mc)
{
	void *va;

	if (!mc || !mc->nobjs)
		return 0;
	va = kvm_mmu_memory_cache_alloc(mc);
	kvm_account_pgtable_pages(va, 1);
	return __pa(va);
}

/*
 * Fences of other harts are interrupts. They are waited for, so no caller has
 * interrupts off.
 */
void slat_c_fence_all(struct kvm *kvm)
{
	lockdep_assert_irqs_enabled();
	kvm_riscv_hfence_gvma_vmid_all(kvm, -1UL, 0);
}

void slat_c_fence_range(struct kvm *kvm, u64 gpa, u64 bytes, u64 order)
{
	lockdep_assert_irqs_enabled();
	kvm_riscv_hfence_gvma_vmid_gpa(kvm, -1UL, 0, gpa, bytes, order);
}

/*
 * The VM's VMID may change meanwhile: then its harts fence everything. Without
 * VMIDs it is 0, which all VMs have.
 */
void slat_c_fence_local_all(struct kvm *kvm)
{
	kvm_riscv_local_hfence_gvma_vmid_all(READ_ONCE(kvm->arch.vmid.vmid));
}

void slat_c_fence_local(struct kvm *kvm, u64 gpa, u64 bytes, u64 order)
{
	kvm_riscv_local_hfence_gvma_vmid_gpa(READ_ONCE(kvm->arch.vmid.vmid), gpa, bytes, order);
}

void __noreturn slat_c_panic(void)
{
	panic("slat: the engine, or what calls it, is wrong");
}

struct slat_retired {
	struct rcu_head rcu;
	u64 words[2];
};

static u64 slat_offset(void)
{
	return (u64)__va(0);
}

static void slat_free_retired(struct rcu_head *rcu)
{
	struct slat_retired *retired = container_of(rcu, struct slat_retired, rcu);

	slat_kvm_free_retired(slat_offset(), retired->words);
	kfree(retired);
}

/*
 * Frees tables that were unlinked, after a grace period. Without memory they
 * wait for the next call, or for the end of the VM.
 */
static void slat_retire(void *vm)
{
	struct slat_retired *retired;

	if (likely(!slat_kvm_has_retired(vm)))
		return;
	retired = kmalloc(sizeof(*retired), GFP_NOWAIT | __GFP_NOWARN);
	if (!retired)
		return;
	slat_kvm_take_retired(vm, retired->words);
	if (retired->words[0] | retired->words[1])
		call_rcu(&retired->rcu, slat_free_retired);
	else
		kfree(retired);
}

static void *slat_enter(struct kvm *kvm, enum slat_op op)
{
	atomic_long_inc(&slat_calls[op]);
	return kvm->arch.slat.vm;
}

void slat_limit_mode(unsigned long *mode, unsigned long *levels)
{
	if (slat_levels < 3 || slat_levels >= *levels)
		return;
	*levels = slat_levels;
	*mode = (HGATP_MODE_SV39X4 + slat_levels - 3) << HGATP_MODE_SHIFT;
}

unsigned long slat_limit_vmids(unsigned long bits)
{
	return min(bits, slat_vmid_bits);
}

static int slat_init(struct kvm *kvm, unsigned long gpa_bits)
{
	struct slat_config config = {
		.kvm = kvm,
		.offset = slat_offset(),
		.gpa_bits = gpa_bits,
		.memory_types = riscv_has_extension_unlikely(RISCV_ISA_EXT_SVPBMT),
	};
	/* kmalloc() aligns a power of two to its size. */
	void *vm = kzalloc(roundup_pow_of_two(slat_kvm_bytes()), GFP_KERNEL_ACCOUNT);
	u64 root;
	int ret;

	if (!vm)
		return -ENOMEM;
	ret = slat_kvm_init(vm, &config, &root);
	if (ret) {
		kfree(vm);
		return ret;
	}
	kvm->arch.pgd = __va(root);
	kvm->arch.pgd_phys = root;
	kvm->arch.slat.read_lock = READ_ONCE(slat_read_lock);
	kvm->arch.slat.split_cache.gfp_zero = __GFP_ZERO;
	kvm->arch.slat.vm = vm;
	kvm->arch.slat.is_on = true;
	atomic_long_inc(&slat_vms);
	return 0;
}

bool slat_alloc(struct kvm *kvm, unsigned long gpa_bits, int *ret)
{
	if (READ_ONCE(slat)) {
		*ret = slat_init(kvm, gpa_bits);
		if (*ret != -EINVAL)
			return true;
		atomic_long_inc(&slat_refused);
		pr_info_ratelimited("kvm: slat: tables of %s (%d) are in C: no such geometry\n",
				    current->comm, task_pid_nr(current));
	}
	atomic_inc(&slat_in_c);
	return false;
}

void slat_left_c(void)
{
	/* Whoever does not see the VM sees that it has no tables. */
	smp_mb__before_atomic();
	atomic_dec(&slat_in_c);
}

/*
 * C's tables are freed at once, so it ages under mmu_lock. A notifier is of one
 * VM, which is counted for as long as it has tables.
 */
bool slat_ages_lockless(void)
{
	bool none = !atomic_read(&slat_in_c);

	smp_rmb();
	return none;
}

/* No vCPU runs. Other threads may be in notifiers. */
void slat_free(struct kvm *kvm)
{
	void *vm;

	write_lock(&kvm->mmu_lock);
	vm = kvm->arch.slat.vm;
	WRITE_ONCE(kvm->arch.slat.vm, NULL);
	kvm->arch.pgd = NULL;
	kvm->arch.pgd_phys = 0;
	write_unlock(&kvm->mmu_lock);
	if (!vm)
		return;

	/* Ageing may be without mmu_lock. */
	if (IS_ENABLED(CONFIG_KVM_MMU_LOCKLESS_AGING))
		synchronize_rcu();
	while (!slat_kvm_destroy_some(vm, SLAT_DESTROY_TABLES))
		cond_resched();
	slat_kvm_destroy(vm);
	kfree(vm);
	kvm_mmu_free_memory_cache(&kvm->arch.slat.split_cache);
}

/*
 * Returns the bytes around the address that one entry of the user's own tables
 * maps. Tables are not freed while interrupts are off.
 */
static unsigned long slat_user_size(struct kvm *kvm, unsigned long hva)
{
	unsigned long flags, size = PAGE_SIZE;
	pgd_t pgd;
	p4d_t p4d;
	pud_t pud;
	pmd_t pmd;

	local_irq_save(flags);
	pgd = READ_ONCE(*pgd_offset(kvm->mm, hva));
	if (pgd_none(pgd))
		goto out;
	p4d = READ_ONCE(*p4d_offset(&pgd, hva));
	if (p4d_none(p4d) || !p4d_present(p4d))
		goto out;
	pud = READ_ONCE(*pud_offset(&p4d, hva));
	if (pud_none(pud) || !pud_present(pud))
		goto out;
	if (pud_leaf(pud)) {
		size = PUD_SIZE;
		goto out;
	}
	pmd = READ_ONCE(*pmd_offset(&pud, hva));
	if (!pmd_none(pmd) && pmd_present(pmd) && pmd_leaf(pmd))
		size = PMD_SIZE;
out:
	local_irq_restore(flags);
	return size;
}

/* Returns the size of the largest leaf for an address: a block of the user's and of the memslot. */
static unsigned long slat_size(struct kvm *kvm, struct kvm_memory_slot *slot, gpa_t gpa,
			       unsigned long hva)
{
	unsigned long size, start = slot->userspace_addr;
	unsigned long end = start + (slot->npages << PAGE_SHIFT);
	gpa_t base = slot->base_gfn << PAGE_SHIFT;

	for (size = slat_user_size(kvm, hva); size > PAGE_SIZE;
	     size = size == PUD_SIZE ? PMD_SIZE : PAGE_SIZE) {
		unsigned long first = hva & ~(size - 1);

		if (!((base ^ start) & (size - 1)) && first >= start && first + size <= end)
			break;
	}
	return size;
}

int slat_map_fault(struct kvm_vcpu *vcpu, struct kvm_memory_slot *slot, gpa_t gpa,
		   unsigned long hva, bool is_write)
{
	struct kvm *kvm = vcpu->kvm;
	struct kvm_mmu_memory_cache *mc = &vcpu->arch.mmu_page_cache;
	bool logging = slot->dirty_bitmap && !(slot->flags & KVM_MEM_READONLY);
	unsigned long mmu_seq, size = PAGE_SIZE;
	gfn_t gfn = gpa >> PAGE_SHIFT;
	kvm_pfn_t pfn;
	bool writable;
	void *vm;
	int ret;

	/* A root is never in a cache. */
	ret = kvm_mmu_topup_memory_cache(mc, 4);
	if (ret)
		return ret;

	/* Pairs with the smp_wmb() in kvm_mmu_invalidate_end(). */
	mmu_seq = kvm->mmu_invalidate_seq;
	smp_rmb();

	pfn = gfn_to_pfn_prot(kvm, gfn, is_write, &writable);
	if (pfn == KVM_PFN_ERR_HWPOISON) {
		send_sig_mceerr(BUS_MCEERR_AR, (void __user *)hva, PAGE_SHIFT, current);
		return 0;
	}
	if (is_sigpending_pfn(pfn))
		return -EINTR;
	if (is_error_noslot_pfn(pfn))
		return -EFAULT;

	/* A page is writable under a log only if it is marked there. */
	if (logging && !is_write)
		writable = false;

	read_lock(&kvm->mmu_lock);
	ret = -EAGAIN;
	if (mmu_invalidate_retry(kvm, mmu_seq))
		goto out;
	if (!logging && pfn_valid(pfn))
		size = slat_size(kvm, slot, gpa, hva);
	vm = slat_enter(kvm, FAULT);
	ret = -EFAULT;
	if (!vm)
		goto out;
	ret = slat_kvm_fault(vm, gpa, size, pfn << PAGE_SHIFT,
			     SLAT_R | SLAT_X | (writable ? SLAT_W : 0),
			     riscv_has_extension_unlikely(RISCV_ISA_EXT_SVVPTC), mc);
	slat_retire(vm);
out:
	read_unlock(&kvm->mmu_lock);
	if (ret >= 0) {
		atomic_long_inc(&slat_faults[ret]);
		if (writable) {
			kvm_set_pfn_dirty(pfn);
			/*
			 * A clear takes the mark, and then the right to write:
			 * the mark is set after the right is given.
			 */
			smp_mb();
			mark_page_dirty_in_slot(kvm, slot, gfn);
		}
		ret = 0;
	}
	kvm_set_pfn_accessed(pfn);
	kvm_release_pfn_clean(pfn);
	return ret == -EAGAIN ? 0 : ret;
}

/*
 * Linux's PAGE_KERNEL_IO, which C maps, lacks the U bit, without which a hart
 * lets no guest access the page.
 */
int slat_map_device(struct kvm *kvm, struct kvm_mmu_memory_cache *mc, gpa_t gpa,
		    phys_addr_t hpa, bool writable)
{
	u64 prot = SLAT_R | (writable ? SLAT_W : 0);
	void *vm = slat_enter(kvm, MAP);
	int ret;

	lockdep_assert_held_write(&kvm->mmu_lock);
	if (!vm)
		return -EFAULT;
	if (riscv_has_extension_unlikely(RISCV_ISA_EXT_SVPBMT))
		prot |= SLAT_DEVICE;
	ret = slat_kvm_map(vm, gpa & PAGE_MASK, PAGE_SIZE, hpa, prot, mc);
	slat_retire(vm);
	/* It is there already. */
	return ret == -EAGAIN ? 0 : ret;
}

/* Returns the end of the chunk that begins at the address. */
static gpa_t slat_chunk_end(gpa_t addr, gpa_t end, u64 chunk)
{
	return min(ALIGN_DOWN(addr, chunk) + chunk, end);
}

/* mmu_lock is held for writing: no fault may map a page before a notifier has ended. */
void slat_unmap(struct kvm *kvm, gpa_t start, gpa_t size, bool may_block)
{
	gpa_t next, end = start + size;
	void *vm;

	lockdep_assert_held_write(&kvm->mmu_lock);
	for (; start < end; start = next) {
		next = slat_chunk_end(start, end, SLAT_CHUNK);
		vm = slat_enter(kvm, UNMAP);
		if (!vm)
			return;
		while (slat_kvm_unmap(vm, start, next - start) == -EAGAIN)
			cpu_relax();
		slat_retire(vm);
		if (may_block && next < end)
			cond_resched_rwlock_write(&kvm->mmu_lock);
	}
}

void kvm_arch_dirty_log_lock(struct kvm *kvm)
{
	if (kvm->arch.slat.read_lock)
		read_lock(&kvm->mmu_lock);
	else
		write_lock(&kvm->mmu_lock);
}

void kvm_arch_dirty_log_unlock(struct kvm *kvm)
{
	if (kvm->arch.slat.read_lock)
		read_unlock(&kvm->mmu_lock);
	else
		write_unlock(&kvm->mmu_lock);
}

/* The caller holds slots_lock, which protects the cache of table pages. */
static void slat_assert_log(struct kvm *kvm)
{
	if (kvm->arch.slat.read_lock)
		lockdep_assert_held_read(&kvm->mmu_lock);
	else
		lockdep_assert_held_write(&kvm->mmu_lock);
	lockdep_assert_held(&kvm->slots_lock);
}

/* The caller fences. */
void slat_wp(struct kvm *kvm, gpa_t start, gpa_t end)
{
	void *vm = slat_enter(kvm, WRPROTECT);

	slat_assert_log(kvm);
	/* A fault holds an entry at times, and nobody looks at the result. */
	while (vm && slat_kvm_wrprotect(vm, start, end - start) == -EAGAIN)
		cpu_relax();
}

/* Splits blocks as far as there is memory: what is not split now, a write splits. */
void slat_split(struct kvm *kvm, gpa_t start, gpa_t end)
{
	struct kvm_mmu_memory_cache *cache = &kvm->arch.slat.split_cache;
	u64 chunk = kvm->arch.slat.split_chunk;
	int ret, needed = DIV_ROUND_UP(chunk, PMD_SIZE) + DIV_ROUND_UP(chunk, PUD_SIZE);
	gpa_t next;
	void *vm;

	slat_assert_log(kvm);
	for (; chunk && start < end; start = next) {
		if (need_resched() || rwlock_needbreak(&kvm->mmu_lock) ||
		    kvm_mmu_memory_cache_nr_free_objects(cache) < needed) {
			kvm_arch_dirty_log_unlock(kvm);
			cond_resched();
			ret = __kvm_mmu_topup_memory_cache(cache, needed, needed);
			kvm_arch_dirty_log_lock(kvm);
			if (ret)
				return;
		}
		vm = slat_enter(kvm, SPLIT);
		if (!vm)
			return;
		next = slat_chunk_end(start, end, chunk);
		ret = slat_kvm_split(vm, start, next - start, cache);
		slat_retire(vm);
		if (ret)
			return;
	}
}

/*
 * A memslot has changed, not its memory. With a log that is initially set, a
 * page is protected when its mark is cleared. Where a log ends, writes put
 * blocks in the place of their tables.
 */
void slat_log(struct kvm *kvm, const struct kvm_memory_slot *old,
	      const struct kvm_memory_slot *new)
{
	bool before = old && old->flags & KVM_MEM_LOG_DIRTY_PAGES;
	gpa_t next, start, end, addr;

	if (before || !(new->flags & KVM_MEM_LOG_DIRTY_PAGES) ||
	    kvm_dirty_log_manual_protect_and_init_set(kvm))
		return;
	start = new->base_gfn << PAGE_SHIFT;
	end = (new->base_gfn + new->npages) << PAGE_SHIFT;
	kvm_arch_dirty_log_lock(kvm);
	for (addr = start; addr < end; addr = next) {
		next = slat_chunk_end(addr, end, SLAT_CHUNK);
		slat_wp(kvm, addr, next);
		if (next < end && (need_resched() || rwlock_needbreak(&kvm->mmu_lock))) {
			kvm_arch_dirty_log_unlock(kvm);
			cond_resched();
			kvm_arch_dirty_log_lock(kvm);
		}
	}
	slat_split(kvm, start, end);
	kvm_arch_dirty_log_unlock(kvm);
	kvm_flush_remote_tlbs_memslot(kvm, new);
}

/* With lockless-ageing the caller does not hold mmu_lock. */
bool slat_age(struct kvm *kvm, struct kvm_gfn_range *range, bool clear)
{
	bool young = false;
	void *vm;

	atomic_long_inc(&slat_calls[AGE]);
	rcu_read_lock();
	vm = READ_ONCE(kvm->arch.slat.vm);
	if (vm)
		young = slat_kvm_age(vm, range->start << PAGE_SHIFT,
				     (range->end - range->start) << PAGE_SHIFT, clear);
	rcu_read_unlock();
	return young;
}

int slat_capability(struct kvm *kvm, long ext)
{
	switch (ext) {
	case KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE:
		return kvm ? kvm->arch.slat.split_chunk : 0;
	case KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES:
		return (kvm ? slat_is_on(kvm) : READ_ONCE(slat)) ? PMD_SIZE | PUD_SIZE : 0;
	}
	return 0;
}

/* As on arm64. */
int kvm_vm_ioctl_enable_cap(struct kvm *kvm, struct kvm_enable_cap *cap)
{
	u64 chunk = cap->args[0];
	int ret = -EINVAL;

	if (cap->flags || cap->cap != KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE || !slat_is_on(kvm))
		return -EINVAL;
	mutex_lock(&kvm->slots_lock);
	if (kvm_are_all_memslots_empty(kvm) &&
	    (!chunk || chunk == PMD_SIZE || chunk == PUD_SIZE)) {
		kvm->arch.slat.split_chunk = chunk;
		ret = 0;
	}
	mutex_unlock(&kvm->slots_lock);
	return ret;
}
