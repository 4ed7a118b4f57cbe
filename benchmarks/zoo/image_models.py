"""One model of every family of timm and torchvision, as small as the family allows."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from zoo.cases import Case, Problem, random_images

CLASSES = 5


def torchvision_cases() -> list[Case]:
    """Return a model of each module of torchvision, but detection, which needs its compiled operators."""
    return [Case("torchvision", family, name, build) for family, (name, build) in _torchvision().items()]


def _torchvision() -> dict[str, tuple[str, Callable[[], Problem]]]:
    """Return a name and a builder by family; classes are called where their smallest model is large."""
    from torchvision import models as tv
    from torchvision.models import quantization, segmentation, video
    from torchvision.models.convnext import CNBlockConfig
    from torchvision.models.resnet import BasicBlock
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    def images(model: Callable[..., nn.Module], size: int = 64, **options: Any) -> Callable[[], Problem]:
        return lambda: Problem(model(num_classes=CLASSES, **options), random_images(size))

    windows = dict(embed_dim=16, depths=[1, 2], num_heads=[2, 4])
    flat = dict(patch_size=[4, 4], window_size=[4, 4], **windows)
    two_blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    return {
        "alexnet": ("alexnet, narrow classifier", images(_narrow_alexnet)),
        "convnext": ("ConvNeXt, 2 blocks", images(tv.ConvNeXt, block_setting=two_blocks)),
        "densenet": ("DenseNet, 2 blocks", images(tv.DenseNet, growth_rate=8, block_config=(2, 2))),
        "efficientnet": ("efficientnet_b0", images(tv.efficientnet_b0)),
        "googlenet": ("googlenet", images(tv.googlenet, aux_logits=False, init_weights=False)),
        "inception": ("inception_v3", images(tv.inception_v3, 96, aux_logits=False, init_weights=False)),
        "maxvit": ("MaxVit, 2 blocks", images(_small_maxvit)),
        "mnasnet": ("mnasnet0_5", images(tv.mnasnet0_5)),
        "mobilenetv2": ("mobilenet_v2, half width", images(tv.mobilenet_v2, width_mult=0.5)),
        "mobilenetv3": ("mobilenet_v3_small", images(tv.mobilenet_v3_small)),
        "regnet": ("regnet_x_400mf", images(tv.regnet_x_400mf)),
        "resnet": ("ResNet, 4 blocks", images(tv.ResNet, block=BasicBlock, layers=[1, 1, 1, 1])),
        "shufflenetv2": ("shufflenet_v2_x0_5", images(tv.shufflenet_v2_x0_5)),
        "squeezenet": ("squeezenet1_1", images(tv.squeezenet1_1)),
        "swin_transformer": ("SwinTransformer, 3 blocks", images(tv.SwinTransformer, **flat)),
        "swin_transformer_v2": (
            "SwinTransformer v2, 3 blocks",
            images(
                tv.SwinTransformer, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2, **flat
            ),
        ),
        "vgg": ("VGG, narrow", images(_narrow_vgg)),
        "vision_transformer": ("VisionTransformer, 2 blocks", images(_small_vit, 32)),
        "segmentation.deeplabv3": ("deeplabv3_mobilenet_v3_large", images(_deeplab)),
        "segmentation.fcn": ("FCN on a ResNet of 4 blocks", images(_small_fcn)),
        "segmentation.lraspp": (
            "lraspp_mobilenet_v3_large",
            images(partial(segmentation.lraspp_mobilenet_v3_large, weights_backbone=None)),
        ),
        "video.resnet": ("VideoResNet, 4 blocks", _videos(partial(_video_resnet, video))),
        "video.mvit": ("MViT, 2 blocks", _videos(_small_mvit)),
        "video.s3d": ("s3d, adaptive pooling", _videos(_pooled_s3d, frames=16, size=64)),
        "video.swin_transformer": (
            "SwinTransformer3d, 3 blocks",
            _videos(
                partial(video.SwinTransformer3d, patch_size=[2, 4, 4], window_size=[2, 4, 4], **windows)
            ),
        ),
        "optical_flow.raft": ("raft_small, 2 updates", _flow),
        "quantization.mobilenetv2": ("mobilenet_v2, float", images(quantization.mobilenet_v2)),
        "quantization.resnet": ("resnet18, float", images(quantization.resnet18)),
        "quantization.shufflenetv2": ("shufflenet_v2_x0_5, float", images(quantization.shufflenet_v2_x0_5)),
    }


def _narrow_alexnet(num_classes: int) -> nn.Module:
    from torchvision.models import alexnet

    model = alexnet()
    model.classifier = nn.Sequential(
        nn.Dropout(), nn.Linear(9216, 32), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, num_classes)
    )
    return model


def _narrow_vgg(num_classes: int) -> nn.Module:
    from torchvision.models.vgg import VGG, make_layers

    model = VGG(make_layers([16, "M", 32, "M", 64, 64, "M"], batch_norm=True), num_classes, init_weights=False)
    model.classifier = nn.Sequential(
        nn.Linear(64 * 49, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, num_classes)
    )
    return model


def _small_vit(num_classes: int) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=num_classes)


def _small_maxvit(num_classes: int) -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=num_classes)


def _deeplab(num_classes: int) -> nn.Module:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    return deeplabv3_mobilenet_v3_large(num_classes=num_classes, weights_backbone=None)


def _small_fcn(num_classes: int) -> nn.Module:
    from torchvision.models import ResNet
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import BasicBlock
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    backbone = IntermediateLayerGetter(ResNet(BasicBlock, [1, 1, 1, 1]), {"layer4": "out"})
    return FCN(backbone, FCNHead(512, num_classes))


def _videos(build: Callable[..., nn.Module], frames: int = 4, size: int = 32) -> Callable[[], Problem]:
    def problem() -> Problem:
        clips = random_images(size, frames=(frames,)).transpose(1, 2).contiguous()
        return Problem(build(num_classes=CLASSES), clips)

    return problem


def _video_resnet(video: Any, num_classes: int) -> nn.Module:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple

    return video.resnet.VideoResNet(
        BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=num_classes
    )


def _small_mvit(num_classes: int) -> nn.Module:
    from torchvision.models.video import MViT
    from torchvision.models.video.mvit import MSBlockConfig

    blocks = [
        MSBlockConfig(1, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return MViT(
        spatial_size=(32, 32),
        temporal_size=4,
        block_setting=blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=num_classes,
    )


def _pooled_s3d(num_classes: int) -> nn.Module:
    from torchvision.models.video import s3d

    model = s3d(num_classes=num_classes)
    model.avgpool = nn.AdaptiveAvgPool3d(1)  # its own needs frames of 224 x 224
    return model


class _Flow(nn.Module):
    """The last of two updates of an optical flow."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.optical_flow import raft_small

        self.model = raft_small()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.model(first, second, num_flow_updates=2)[-1]


def _flow() -> Problem:
    pairs = random_images(128, frames=(2,))
    return Problem(_Flow(), {"first": pairs[:, 0].contiguous(), "second": pairs[:, 1].contiguous()})
