// SPDX-License-Identifier: GPL-2.0-only
//
// A vCPU that is initialised again after it ran has its caches off from now on. What it had flushed
// for is unmapped first, so that a flush before that is never counted for what is mapped after it.
//
// file: arch/arm64/kvm/arm.c
// leaves 1: mutex_init(&kvm->arch.flush_lock);
// leaves 1: kvm_rearm_cache_flush(vcpu->kvm);

@@
@@
 kvm_arch_init_vm(...)
 {
 <...
 mutex_init(&kvm->arch.config_lock);
+mutex_init(&kvm->arch.flush_lock);
 ...>
 }

@@
@@
 kvm_arch_vcpu_ioctl_vcpu_init(...)
 {
 <...
 if (vcpu_has_run_once(vcpu)) {
 ...
+		kvm_rearm_cache_flush(vcpu->kvm);
 }
 ...>
 }
