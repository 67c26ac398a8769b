# What the jobs on OLCF Frontier share; sourced by *_frontier.sbatch from the root of the repository.
#
# Sources of the settings: OLCF user documentation, software/analytics/pytorch_frontier.rst and
# systems/frontier_user_guide.rst (commit 27459031, 2026-07-22).

VENV=${VENV:-.venv}                             # with torch for ROCm, and piper-megatron installed
PRETRAIN=${PRETRAIN:-examples/pretrain_moe.py}  # or the pretrain_gpt.py of a Megatron-LM checkout

module load PrgEnv-gnu rocm craype-accel-amd-gfx90a
# without the plug-in RCCL talks TCP; its module sets FI_CXI_RDZV_PROTO=alt_read, which in turn needs
# the job's --network=disable_rdzv_get
module load rccl-net-plugin
export PATH=$VENV/bin:$PATH

export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 # Slingshot, not the management network
export NCCL_CROSS_NIC=1                       # rings and trees may change the NIC between nodes
export OMP_NUM_THREADS=7                      # 7 cores a task: the system keeps one of every 8
# MIOpen keeps databases; on the shared file system they end in I/O errors
export MIOPEN_USER_DB_PATH=${TMPDIR:-/tmp}/miopen-$SLURM_JOB_ID
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH

# Starts one task for each GCD. Megatron takes device LOCAL_RANK, so every task sees all eight, in
# the order that makes device i the one beside the cores of task i (--gpu-bind=closest would show
# each task a single device). Neighbours in this order are the two GCDs of one MI250X.
train() {
    srun --ntasks-per-node 8 --cpus-per-task 7 --gpus-per-node 8 --gpu-bind none \
        env ROCR_VISIBLE_DEVICES=4,5,2,3,6,7,0,1 piper-megatron run "$PRETRAIN" "$@"
}
