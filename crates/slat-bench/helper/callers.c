/* The callers of the walks: `cut.c` holds functions cut out of the tree's mmu.c and kvm_main.c. */
#include "callers.h"

#include "cut.c"

int slat_split(struct kvm *kvm, u64 start, u64 end)
{
	return kvm_mmu_split_huge_pages(kvm, start, end);
}

void slat_protect(struct kvm *kvm, u64 start, u64 end)
{
	SLAT_WP_RANGE(&kvm->arch.mmu, start, end);
}

int slat_unmap(struct kvm *kvm, u64 start, u64 end)
{
	return stage2_apply_range(&kvm->arch.mmu, start, end, kvm_pgtable_stage2_unmap, true);
}

int slat_flush(struct kvm *kvm, u64 start, u64 end)
{
	return stage2_apply_range(&kvm->arch.mmu, start, end, kvm_pgtable_stage2_flush, true);
}
