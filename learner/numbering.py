"""Rows numbered by the trajectory they belong to, and trajectories by their group, in ascending order of the ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Numbering:
    """Numbers from 0, without gaps."""

    of_row: Tensor
    """[rows] int64, each row's trajectory."""
    groups: Tensor
    """[trajectories] int64, each trajectory's group."""
    group_ids: Tensor
    """[groups] int64, ascending."""

    @staticmethod
    def of(group_ids: Tensor, trajectory_ids: Tensor) -> Numbering:
        """
        Args:
            group_ids: [rows] int64.
            trajectory_ids: [rows] int64, within the group.
        """
        if not len(group_ids):
            return Numbering(group_ids, group_ids, group_ids)
        unique_groups, group = torch.unique(group_ids, return_inverse=True)
        inside = trajectory_ids - trajectory_ids.min()
        width = int(inside.max()) + 1
        trajectories, of_row = torch.unique(group * width + inside, return_inverse=True)
        return Numbering(of_row, trajectories // width, unique_groups)
