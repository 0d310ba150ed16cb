def torch_sum():
    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    found = torch.ones(3)
    torch.distributed.all_reduce(found)
    torch.distributed.destroy_process_group()
    return found.tolist()
