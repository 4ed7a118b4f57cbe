"""One model of every family of timm and torchvision, as small as the family allows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from zoo.cases import Case, Problem, random_images

CLASSES = 5


class TimmModel(NamedTuple):
    """A model's name, the size of its images, and what makes it smaller than its name says."""

    name: str
    size: int
    options: dict[str, Any]


def _timm(name: str, size: int = 64, **options: Any) -> TimmModel:
    return TimmModel(name, size, options)


TIMM = {  # by module of timm.models
    "beit": _timm("beit_base_patch16_224", img_size=64, embed_dim=64, depth=2, num_heads=2),
    "byoanet": _timm("botnet26t_256", img_size=64),
    "byobnet": _timm("test_byobnet", img_size=64),
    "cait": _timm("cait_xxs24_224", img_size=64, depth=2, embed_dim=48, num_heads=2),
    "coat": _timm("coat_tiny", img_size=64, serial_depths=(1, 1, 1, 1), parallel_depth=1),
    "convit": _timm("convit_tiny", img_size=64, depth=3, local_up_to_layer=2),
    "convmixer": _timm("convmixer_768_32", img_size=64),
    "convnext": _timm("convnext_zepto_rms"),
    "cpubone": _timm("cpubone_nano"),
    "crossvit": _timm("crossvit_tiny_240", 240, depth=((1, 1, 0),)),
    "csatv2": _timm("csatv2", img_size=64),
    "cspnet": _timm("cs3darknet_focus_s"),
    "davit": _timm("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(16, 32, 64, 64), num_heads=(1, 2, 4, 4)),
    "deepseek_vit": _timm("deepseek_vit_412m", 56, img_size=56, embed_dim=64, depth=2, num_heads=2),
    "deit": _timm("deit_tiny_patch16_224", img_size=64),
    "densenet": _timm("densenet121", block_config=(2, 2), growth_rate=8),
    "dla": _timm("dla46x_c"),
    "dpn": _timm("dpn48b", k_sec=(1, 1, 1, 1)),
    "edgenext": _timm("edgenext_x_small"),
    "efficientformer": _timm("efficientformer_l1", 224, depths=(1, 1, 1, 2)),
    "efficientformer_v2": _timm("efficientformerv2_s0", img_size=64),
    "efficientnet": _timm("test_efficientnet"),
    "efficientvim": _timm("efficientvim_m1"),
    "efficientvit_mit": _timm("efficientvit_b0"),
    "efficientvit_msra": _timm("efficientvit_m0", img_size=64),
    "eva": _timm("vit_tiny_patch16_dinov3_qkvb", img_size=64),
    "fasternet": _timm("fasternet_t0"),
    "fastvit": _timm("fastvit_t8"),
    "focalnet": _timm("focalnet_tiny_srf"),
    "gcvit": _timm("gcvit_xxtiny", img_size=64),
    "gemma4_vit": _timm("gemma4_vit_167m", img_size=64, embed_dim=64, depth=2, num_heads=2),
    "ghostnet": _timm("ghostnet_050"),
    "hardcorenas": _timm("hardcorenas_b"),
    "hgnet": _timm("hgnetv2_b0", img_size=64),
    "hiera": _timm("hiera_tiny_224", img_size=64, embed_dim=16, stages=(1, 1, 1, 1)),
    "hieradet_sam2": _timm("sam2_hiera_tiny", embed_dim=16, stages=(1, 1, 1, 1)),
    "hrnet": _timm("hrnet_w18_small"),
    "iformer": _timm("iformer_t"),
    "inception_next": _timm("inception_next_atto"),
    "inception_resnet_v2": _timm("inception_resnet_v2", 128),
    "inception_v3": _timm("inception_v3", 96, aux_logits=False),
    "inception_v4": _timm("inception_v4", 128),
    "lcnetv2": _timm("lcnetv2_small"),
    "levit": _timm("levit_128s", img_size=64),
    "lowformer": _timm("lowformer_b0"),
    "mambaout": _timm("test_mambaout"),
    "maxxvit": _timm("maxvit_pico_rw_256", img_size=64),
    "metaformer": _timm("poolformerv2_s12", img_size=64),
    "mlp_mixer": _timm("gmixer_12_224", img_size=64),
    "mobilenetv3": _timm("lcnet_035"),
    "mobilenetv5": _timm("mobilenetv5_base", channel_multiplier=0.25),
    "mobilevit": _timm("mobilevit_xxs", img_size=64),
    "mvitv2": _timm("mvitv2_tiny", img_size=64),
    "naflexvit": _timm("naflexvit_base_patch16_gap", img_size=64, embed_dim=64, depth=2, num_heads=2),
    "nasnet": _timm("nasnetalarge", 96, stem_size=8, num_features=192),
    "nest": _timm("nest_tiny", img_size=64),
    "nextvit": _timm("nextvit_small"),
    "nfnet": _timm("test_nfnet"),
    "pit": _timm("pit_xs_224", img_size=64),
    "pnasnet": _timm("pnasnet5large"),
    "pvt_v2": _timm("pvt_v2_b0"),
    "qwen3_vit": _timm("qwen3_vit_88m", img_size=64, embed_dim=64, depth=2, num_heads=2),
    "rdnet": _timm("rdnet_tiny"),
    "regnet": _timm("regnetx_002"),
    "repghost": _timm("repghostnet_050"),
    "repvit": _timm("repvit_m1", img_size=64),
    "res2net": _timm("res2net50_14w_8s", layers=(1, 1, 1, 1)),
    "resnest": _timm("resnest14d"),
    "resnet": _timm("test_resnet"),
    "resnetv2": _timm("resnetv2_18", layers=(1, 1, 1, 1), channels=(16, 32, 32, 64)),
    "rexnet": _timm("rexnet_100"),
    "selecsls": _timm("selecsls42"),
    "senet": _timm("legacy_seresnet18", layers=(1, 1, 1, 1)),
    "sequencer": _timm(
        "sequencer2d_s",
        img_size=64,
        layers=(1, 1, 1, 1),
        embed_dims=(16, 32, 32, 32),
        hidden_sizes=(8, 8, 8, 8),
    ),
    "shvit": _timm("shvit_s1"),
    "sknet": _timm("skresnet18", layers=(1, 1, 1, 1)),
    "starnet": _timm("starnet_s050", img_size=64),
    "swiftformer": _timm("swiftformer_xs", img_size=64),
    "swin_transformer": _timm(
        "swin_tiny_patch4_window7_224", img_size=64, embed_dim=16, depths=(1, 2, 1), num_heads=(1, 2, 4)
    ),
    "swin_transformer_v2": _timm(
        "swinv2_tiny_window16_256",
        img_size=64,
        window_size=4,
        embed_dim=16,
        depths=(1, 2, 1),
        num_heads=(1, 2, 4),
    ),
    "swin_transformer_v2_cr": _timm(
        "swinv2_cr_tiny_224", img_size=64, embed_dim=16, depths=(1, 2, 1), num_heads=(1, 2, 4)
    ),
    "tiny_vit": _timm("tiny_vit_5m_224"),
    "tnt": _timm("tnt_s_legacy_patch16_224", img_size=64, embed_dim=64, depth=2, num_heads_outer=2),
    "tresnet": _timm("tresnet_m", layers=(1, 1, 1, 1), width_factor=0.25),
    "twins": _timm(
        "twins_svt_small",
        img_size=64,
        embed_dims=(16, 32, 64, 64),
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 4),
    ),
    "vgg": _timm("vgg11", num_features=64),
    "visformer": _timm(
        "visformer_tiny", img_size=64, embed_dim=48, depth=(1, 1, 1), num_heads=2, init_channels=8
    ),
    "vision_transformer": _timm("test_vit", img_size=64),
    "vision_transformer_hybrid": _timm("vit_tiny_r_s16_p8_224", img_size=64),
    "vision_transformer_relpos": _timm(
        "vit_srelpos_small_patch16_224", img_size=64, embed_dim=64, depth=2, num_heads=2
    ),
    "vision_transformer_sam": _timm(
        "samvit_base_patch16_224", img_size=64, embed_dim=64, depth=2, num_heads=2
    ),
    "vitamin": _timm("vitamin_small_224", img_size=64),
    "volo": _timm("volo_d1_224", img_size=64),
    "vovnet": _timm("ese_vovnet19b_slim_dw"),
    "xception": _timm("legacy_xception"),
    "xception_aligned": _timm("xception41p"),
    "xcit": _timm("xcit_nano_12_p8_224", img_size=64, depth=2, embed_dim=48, num_heads=2),
}


def timm_cases() -> list[Case]:
    """Return a model of each module of timm."""
    return [Case("timm", family, model.name, partial(build_timm, model)) for family, model in TIMM.items()]


def build_timm(model: TimmModel) -> Problem:
    """Return a model of timm, and images of its size."""
    import timm

    built = timm.create_model(model.name, num_classes=CLASSES, **model.options)
    return Problem(built, random_images(model.size))


def torchvision_cases() -> list[Case]:
    """Return a model of each module of torchvision.

    Without detection, which needs its compiled operators, and RAFT, which does not run in float64.
    """
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
            images(tv.SwinTransformer, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2, **flat),
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
            _videos(partial(video.SwinTransformer3d, patch_size=[2, 4, 4], window_size=[2, 4, 4], **windows)),
        ),
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

    model = VGG(
        make_layers([16, "M", 32, "M", 64, 64, "M"], batch_norm=True), num_classes, init_weights=False
    )
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
